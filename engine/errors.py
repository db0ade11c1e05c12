"""Everything the engine can refuse or fail with."""


class EngineError(Exception):
    """Base of all engine errors; never raised itself."""


class ConfigError(EngineError):
    """A configuration value is out of range or contradicts another. Raised when it is set."""


class ModelLoadError(EngineError):
    """The model's files are missing, damaged, or of an architecture that is not supported."""


class NeverFitsError(EngineError):
    """The request needs more tokens or KV blocks than this engine has. Raised at submit."""


class DuplicateRequestError(EngineError):
    """A request with this id is already in the engine. Raised at submit."""


class EngineStoppedError(EngineError):
    """The engine is draining, stopped or failed, and accepts no work. Raised at submit."""


class TemplateError(EngineError):
    """The model's chat template refuses these messages, or the model has no template."""


class GrammarError(EngineError):
    """A grammar, schema or regular expression cannot be compiled, or is beyond the bounds."""


class InvariantError(EngineError):
    """The engine's own books do not balance: a bug. Raised by the checks of debug mode."""
