"""The errors the mapper raises on purpose; everything else is a bug."""


class MapperError(Exception):
    """Base of all errors with a cause the operator can act on."""


class UnsupportedModel(MapperError):
    """A model (or pair of models) whose KV cache cannot be mapped.

    `field` names what rules it out, so that callers can report it as data.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class BadPage(MapperError):
    """A page file that is truncated, corrupt, or belongs to another model.

    `reason` is one of `store.page.BAD_PAGE_REASONS`, fit for a metric label.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class StoreFull(MapperError):
    """No page can be evicted to make room: all are pinned, or the page is too large."""


class BadArtifact(MapperError):
    """A mapping artifact that is incomplete, altered, or of an unknown version."""


class CalibrationError(MapperError):
    """Calibration cannot give a trustworthy map (too little text, non-finite values, ...)."""


class BadTask(MapperError):
    """A task file that cannot be used; the message names the file and the line."""


class MissingExtra(MapperError):
    """Something optional was asked for that is not installed; the message says how to."""
