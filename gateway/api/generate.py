"""What completions and chat completions share: one POST from its first byte to its last."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from engine.sequence import Grammar, SamplingParams
from gateway.admission import Admission
from gateway.auth import Authenticator
from gateway.choices import Choice, ChoiceReader, Prompt, best_of
from gateway.client import watch_client
from gateway.deadlines import Arrival, read_deadline
from gateway.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedMediaTypeError,
)
from gateway.generation import Generation
from gateway.sampling import (
    check_sampling,
    checked_grammar,
    encode_bad_words,
    sampling_params,
)
from gateway.schemas.generation import GenerationBody
from gateway.schemas.parsing import parse
from gateway.served_model import ServedModel
from gateway.settings import Settings
from gateway.streaming import DONE, EventStream, ResponseShape, event, stream_outputs
from gateway.tiers import ServiceTiers
from gateway.turns import TenantTurns

# Bodies beyond this are parsed in a thread: the event loop serves everybody's streams.
PARSE_INLINE_BYTES = 64 * 1024
# In one answer. Writing one takes 2 to 9 us, and a part of that holds the interpreter.
MAX_ANSWER_LOGPROBS = 2**18

BodyT = TypeVar("BodyT", bound=GenerationBody)


class Resource(Protocol[BodyT]):
    """What is particular to one of the two resources."""

    schema: type[BodyT]
    prompt_param: str  # the field that an over-long prompt is blamed on

    def text_bytes(self, body: BodyT) -> int:
        """Size of the longest prompt as text."""
        ...

    def encoders(self, body: BodyT, model: ServedModel) -> list[Callable[[], Sequence[int]]]:
        """What finds the token ids, one for each prompt. Slow: each is called in a thread."""
        ...

    def echo(self, body: BodyT, number: int, token_ids: Sequence[int], model: ServedModel) -> str:
        """What stands before the text of each choice of prompt `number`."""
        ...

    def default_tokens(self, settings: Settings) -> int: ...

    def shape(
        self, body: BodyT, response_id: str, model: ServedModel, created: int, tier: str | None
    ) -> ResponseShape:
        """How the answer is written. `tier` is the service tier to echo, if one was asked for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What an endpoint works with."""

    settings: Settings
    model: ServedModel
    auth: Authenticator
    tiers: ServiceTiers
    admission: Admission
    now: Callable[[], float]  # epoch seconds
    # Bounds the threads that tokenise at once: more would only take cores from the engine.
    tokenising: TenantTurns


class GenerationEndpoint(Generic[BodyT]):
    """An ASGI app for POST requests that generate."""

    def __init__(self, resource: Resource[BodyT], services: Services) -> None:
        self._resource = resource
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = asyncio.get_running_loop().time()
        request = Request(scope, receive)
        services = self._services
        principal = await services.auth.principal(request)
        body = await self._read_body(request)
        if body.model != services.model.name:
            raise ModelNotFoundError(
                f"The model '{body.model}' does not exist or you do not have access to it."
            )
        check_sampling(body, services.model)
        services.admission.check_ready()
        deadline = read_deadline(request.headers, is_stream=bool(body.stream))
        principal, tier = await services.tiers.serve(principal, body.service_tier)
        request_id: str = request.state.request_id
        async with watch_client(receive) as client:
            prompts = await self._prompts(principal.tenant_id, body)
            admitted = services.admission.admit(
                principal,
                request_id,
                prompts,
                client,
                Arrival(arrived, deadline),
                cache_salt=body.cache_salt,
                use_prefix_cache=body.use_prefix_cache is not False,
            )
            async with admitted as generation:
                reader = ChoiceReader(prompts, services.model.token_bytes, body.num_logprobs)
                response_id, created = request_id.removeprefix("req_"), int(services.now())
                shape = self._resource.shape(body, response_id, services.model, created, tier)
                if body.stream:
                    await self._stream(generation, reader, shape, body.include_usage, send)
                    return
                response = await self._respond(generation, reader, shape, body)
                await response(scope, receive, send)

    async def _read_body(self, request: Request) -> BodyT:
        media_type = request.headers.get("content-type", "application/json")
        if media_type.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaTypeError("Send the header 'Content-Type: application/json'.")
        raw = await request.body()
        if len(raw) <= PARSE_INLINE_BYTES:
            return parse(self._resource.schema, raw)
        return await asyncio.to_thread(parse, self._resource.schema, raw)

    async def _prompts(self, tenant_id: str, body: BodyT) -> list[Prompt]:
        """Token ids and bounds of each prompt. Raises InvalidRequestError or TemplateError."""
        resource, services = self._resource, self._services
        check_text_size(resource.text_bytes(body), services.model, resource.prompt_param)
        bad_words: tuple[tuple[int, ...], ...] = ()
        grammar: Grammar | None = None
        if body.bad_words:
            async with services.tokenising.turn(tenant_id):
                bad_words = await asyncio.to_thread(
                    encode_bad_words, body.bad_words, services.model
                )
        if body.is_constrained:
            async with services.tokenising.turn(tenant_id):
                grammar = await asyncio.to_thread(checked_grammar, body, services.model)
        params = partial(sampling_params, body, bad_words=bad_words, grammar=grammar)
        prompts = []
        for number, encode in enumerate(resource.encoders(body, services.model)):
            # A turn for each: many prompts hold up other tenants no longer than one.
            async with services.tokenising.turn(tenant_id):
                prompts.append(await asyncio.to_thread(self._prompt, number, encode, body, params))
        check_logprobs(prompts, body)
        return prompts

    def _prompt(
        self,
        number: int,
        encode: Callable[[], Sequence[int]],
        body: BodyT,
        params: Callable[[int], SamplingParams],
    ) -> Prompt:
        ids = encode()
        max_tokens = self._max_tokens(ids, body)
        echo = self._resource.echo(body, number, ids, self._services.model)
        return Prompt(token_ids=tuple(ids), params=params(max_tokens), echo=echo)

    def _max_tokens(self, ids: Sequence[int], body: BodyT) -> int:
        """The output limit of one prompt, once the prompt is known to be possible."""
        model, param = self._services.model, self._resource.prompt_param
        if not ids:
            raise InvalidRequestError("The prompt has no tokens.", param=param)
        max_tokens = output_tokens(
            num_prompt_tokens=len(ids),
            requested=body.requested_tokens,
            default=self._resource.default_tokens(self._services.settings),
            max_model_len=model.max_model_len,
            param=param,
        )
        # Last, as its cost grows with the prompt.
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            raise InvalidRequestError(
                f"Token ids of this model are 0 to {model.vocab_size - 1}.", param=param
            )
        return max_tokens

    async def _respond(
        self, generation: Generation, reader: ChoiceReader, shape: ResponseShape, body: BodyT
    ) -> JSONResponse:
        choices = await self._gather(generation, reader, body)
        await self._services.admission.finish(generation)

        def answer() -> JSONResponse:
            return JSONResponse(
                shape.complete(choices, generation.usage), headers=generation.headers()
            )

        if body.num_logprobs is None and body.num_prompt_logprobs is None:
            return answer()
        return await asyncio.to_thread(answer)  # may be long to write

    async def _gather(
        self, generation: Generation, reader: ChoiceReader, body: BodyT
    ) -> list[Choice]:
        """All choices of an answer that is not streamed, in the order of their indices."""
        width = body.num_sequences
        choices = [Choice() for _ in range(len(reader.prompts) * width)]
        async with aclosing(reader.outputs(generation.events(silence_seconds=None))) as outputs:
            async for output in outputs:
                assert output is not None  # there is no silence without a limit to it
                choices[output.index].add(output)
        chosen = []
        for number, prompt in enumerate(reader.prompts):
            kept: Sequence[int] = range(body.num_choices)  # beams come best first
            if width > body.num_choices and prompt.params.beam is None:
                ends = [generation.finished[number, index] for index in range(width)]
                kept = best_of(ends, body.num_choices)
            for index in kept:
                choice = choices[number * width + index]
                choice.prompt = reader.prompt_tokens(number, body.prompt_logprobs)
                chosen.append(choice)
        return chosen

    async def _stream(
        self,
        generation: Generation,
        reader: ChoiceReader,
        shape: ResponseShape,
        include_usage: bool,
        send: Send,
    ) -> None:
        settings = self._services.settings
        stream = EventStream(send, generation.headers, settings.write_timeout_seconds)
        outputs = reader.outputs(generation.events(settings.keepalive_seconds))
        if not await stream_outputs(stream, outputs, shape):
            return
        # Settled before the end: who has read [DONE] finds its row in the ledger.
        await self._services.admission.finish(generation)
        usage = event(shape.usage_chunk(generation.usage)) if include_usage else b""
        await stream.write(usage + DONE, last=True)


def check_text_size(num_bytes: int, model: ServedModel, param: str) -> None:
    """Refuse what cannot fit whatever its tokens are, before the cost of finding them.

    Raises ContextLengthError.
    """
    least_tokens = math.ceil(num_bytes / model.max_token_bytes)
    if least_tokens > model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your "
            f"{param} resulted in at least {least_tokens} tokens. Please reduce the length of the "
            f"{param}.",
            param=param,
        )


def output_tokens(
    *, num_prompt_tokens: int, requested: int | None, default: int, max_model_len: int, param: str
) -> int:
    """The output limit: as requested or refused, never silently shortened; else the default.

    Raises ContextLengthError when prompt and output do not fit in `max_model_len`.
    """
    head = f"This model's maximum context length is {max_model_len} tokens. However, "
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"{head}your {param} resulted in {num_prompt_tokens} tokens, and at least one is "
            f"needed for the completion. Please reduce the length of the {param}.",
            param=param,
        )
    remaining = max_model_len - num_prompt_tokens
    if requested is None:
        return min(default, remaining)
    if requested > remaining:
        raise ContextLengthError(
            f"{head}you requested {num_prompt_tokens + requested} tokens ({num_prompt_tokens} in "
            f"the {param}, {requested} in the completion). Please reduce the length of the "
            f"{param} or completion.",
            param=param,
        )
    return requested


def check_logprobs(prompts: Sequence[Prompt], body: GenerationBody) -> None:
    """Refuse what could become an answer of too many logprobs. Raises InvalidRequestError.

    A stream's generated tokens come one by one: only its echo counts.
    """
    num_logprobs = 0
    for prompt in prompts:
        if body.num_prompt_logprobs is not None:
            num_logprobs += len(prompt.token_ids) * (1 + body.num_prompt_logprobs)
        if body.num_logprobs is not None and not body.stream:
            num_logprobs += prompt.params.max_tokens * (1 + body.num_logprobs)
    num_logprobs *= body.num_choices
    if num_logprobs > MAX_ANSWER_LOGPROBS:
        raise InvalidRequestError(
            f"All choices together could have {num_logprobs} logprobs; an answer may have "
            f"{MAX_ANSWER_LOGPROBS}. Ask for fewer alternatives, tokens or choices.",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
