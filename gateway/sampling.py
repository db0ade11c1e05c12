"""From a validated body to the engine's sampling parameters: what only the model can check."""

import secrets
from collections.abc import Sequence

from engine.errors import GrammarError
from engine.sequence import BeamSearch, Grammar, SamplingParams
from gateway.errors import InvalidRequestError
from gateway.schemas.generation import GenerationBody
from gateway.served_model import ServedModel


def check_sampling(body: GenerationBody, model: ServedModel) -> None:
    """Bounds that depend on what is served. Raises InvalidRequestError."""
    if body.num_sequences > model.max_seqs:
        raise InvalidRequestError(
            f"This server runs at most {model.max_seqs} sequences at once.",
            param="n" if body.num_sequences == body.num_choices else "best_of",
        )
    for param, token_ids in (
        ("logit_bias", body.logit_bias or {}),
        ("stop_token_ids", body.stop_token_ids or ()),
    ):
        if max(token_ids, default=0) >= model.vocab_size:
            raise InvalidRequestError(
                f"Token ids of this model are 0 to {model.vocab_size - 1}.", param=param
            )


def sampling_params(
    body: GenerationBody,
    max_tokens: int,
    *,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The engine's view of a body; a prompt without a seed gets one of its own.

    Raises InvalidRequestError where the output limit contradicts another field.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(
            f"'min_tokens' is more than the {max_tokens} tokens of output.", param="min_tokens"
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    ranks = body.num_sequences > body.num_choices and not body.use_beam_search
    return SamplingParams(
        max_tokens=max_tokens,
        n=1 if body.use_beam_search else body.num_sequences,
        beam=_beam_search(body),
        # The smallest nucleus is the likeliest token.
        temperature=0.0 if body.top_p == 0 else temperature,
        top_k=max(0, body.top_k or 0),
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple((body.logit_bias or {}).items()),
        bad_words=bad_words,
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        min_tokens=body.min_tokens or 0,
        stop=body.stop,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        # The best of several are found by their logprobs.
        logprobs=0 if body.num_logprobs is None and ranks else body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        grammar=grammar,
    )


def _beam_search(body: GenerationBody) -> BeamSearch | None:
    if not body.use_beam_search:
        return None
    return BeamSearch(
        width=body.num_sequences,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
    )


def checked_grammar(body: GenerationBody, model: ServedModel) -> Grammar | None:
    """What the text has to match, known to compile. Slow: call off-loop.

    Raises InvalidRequestError.
    """
    grammar = body.grammar()
    if grammar is not None:
        try:
            model.compile_grammar(grammar)  # the engine's compilation finds it in the cache
        except GrammarError as error:
            param = body.grammar_param
            code = "invalid_function_parameters" if param == "tools" else "invalid_grammar"
            raise InvalidRequestError(
                f"Invalid value for '{param}': {error}.", param=param, code=code
            ) from error
    return grammar


def encode_bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word at the beginning of a text and after a space. Slow: call off-loop."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(model.encode_plain(word.lstrip() or word))
        spaced = tuple(model.encode_plain(" " + word.lstrip()))
        found[plain] = None
        # Where the space is a token of its own, the word after it is the plain one.
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(ids for ids in found if ids)
