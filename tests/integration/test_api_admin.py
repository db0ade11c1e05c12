"""The status page: what it shows, and who may see it."""

import base64

import pytest

from tests.gateway_kit import open_harness


async def test_the_page_shows_engine_and_tenants(sqlite_url: str) -> None:
    async with open_harness(sqlite_url) as harness:
        secret = await harness.tenant("acme")
        async with harness.client(secret) as http:
            body = {"model": "bytes", "prompt": "text:hello|"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            await harness.until_idle()
            response = await http.get("/admin")
            style = await http.get("/admin/status.css")

    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert '<dd data-testid="model">bytes</dd>' in response.text
    assert "● serving" in response.text
    # 11 prompt tokens, 6 output tokens with the one that ends the text.
    assert '<th scope="row">acme</th><td>1</td><td>0</td><td>0</td><td>23</td>' in response.text
    assert style.headers["content-type"].startswith("text/css")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic not-base64!", 401),
        ("Basic " + base64.b64encode(b"me:wrong").decode(), 401),
        ("Basic é".encode("latin-1"), 401),
        ("Bearer t0kén".encode("latin-1"), 401),
        ("Basic " + base64.b64encode("anyone:t0kén".encode()).decode(), 200),
        ("Bearer t0kén".encode(), 200),
    ],
)
async def test_a_token_guards_it(
    sqlite_url: str, authorization: str | bytes | None, status: int
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    environ = {"HEADRACE_OPERATOR_TOKEN": "t0kén"}
    async with (
        open_harness(sqlite_url, environ=environ) as harness,
        harness.client(**headers) as http,
    ):
        response = await http.get("/admin")
        metrics = await http.get("/metrics")

    assert (response.status_code, metrics.status_code) == (status, status)
    if status == 401:
        assert response.headers["www-authenticate"].startswith("Basic")
