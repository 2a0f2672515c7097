"""ContextThreadPool that do something together for one request, task or command."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ContextThreadPool(ThreadPoolExecutor):
    """A pool whose threads know what is being done, as the one knows that hands work to them: the id of the log."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread do this, in a copy of the present context."""
        context = copy_context()
        return super().submit(lambda: context.run(fn, *args, **kwargs))
