"""Owns what everything that is closed has in common: the block that closes it, and that there is one of it. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, TypeVar

Own = TypeVar("Own", bound="Closing")


class Closing(ABC):
    """Something that holds more than memory, until ``close()``."""

    _kind: ClassVar[str]  # as messages call it

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _require_open(self) -> None:
        """Raises ClosedError or ForkedError, as its class says."""

    def __enter__(self: Own) -> Own:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"a {self._kind} cannot be pickled or copied")
