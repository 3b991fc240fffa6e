"""The errors that users meet. Each message says what was expected, what was found and what mends it."""


class EagleError(ValueError):
    """Base of every error the toolkit raises about its input; the command line prints it without a traceback."""


class RecipeError(EagleError):
    """A recipe file or override that the schema does not accept."""


class DataError(EagleError):
    """Conversations or prompts that cannot be read or rendered."""


class TargetError(EagleError):
    """A target model that cannot be loaded, or whose parts were not found."""


class FeatureError(EagleError):
    """Stored or streamed features that break their contract."""


class TrainingError(EagleError):
    """Training that cannot go on: a loss that is not finite, or nothing to learn from."""


class CheckpointError(EagleError):
    """A draft checkpoint that is cut short or does not fit."""


class ExportError(EagleError):
    """An export that an engine would not load as trained."""


class DecodingError(EagleError):
    """A generator called with options that it cannot honour."""


class StreamError(EagleError):
    """A feature server that refused, failed or answered nonsense."""


class ImageError(DataError):
    """Pictures that a target's processor does not take."""


class MissingExtraError(EagleError, ImportError):
    """An optional dependency that is not installed."""
