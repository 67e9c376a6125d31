"""How the contract grows: what a later version adds to its base classes reaches only the plugins that know it.

A minor adds an argument with a default to a method, and hosts pass it. A plugin that was written before does not take
it. So each base class of a contract names ``Growing`` among its bases: if a subclass overrides a method without such an
argument, the argument is left out when the method is called. This is found out once, when the class is defined. A
method that takes all arguments is left as it is, so that calling it costs nothing more.

A minor may also add a method or a field. Its name begins with ``RESERVED``, so no plugin has something else of that
name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kvframe.contract.errors import PluginError

RESERVED = "kvframe_"
"""How the names of methods and fields begin that later versions add to the base classes of the contract."""

_OPTIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Growing:
    """Makes a class that names it a base class of a contract: later versions may add arguments with a default."""

    __slots__ = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Leave arguments out that the class's methods do not take; refuse names that the contract keeps for itself."""
        super().__init_subclass__(**arguments)
        if Growing in cls.__bases__:
            return
        bases = [base for base in cls.__mro__ if Growing in base.__bases__]
        for name, attribute in [*vars(cls).items(), *((name, None) for name in inspect.get_annotations(cls))]:
            promised = next((vars(base)[name] for base in bases if name in vars(base)), None)
            if name.startswith(RESERVED) and promised is None and not _declares(bases, name):
                raise PluginError(
                    f"{cls.__name__} defines {name!r}; names that begin with {RESERVED!r} are kept for later versions "
                    "of the contract: begin it otherwise"
                )
            if promised is not None and attribute is not None and (not name.startswith("__") or name == "__call__"):
                fitted = _fitted(attribute, promised)
                if fitted is not attribute:
                    setattr(cls, name, fitted)


def _declares(bases: list[type], name: str) -> bool:
    return any(name in inspect.get_annotations(base) for base in bases)


def _fitted(attribute: Any, promised: Any) -> Any:
    """Return a method of a plugin's class, which leaves out the arguments that it does not take."""
    if isinstance(attribute, classmethod | staticmethod):
        function = _fitted(attribute.__func__, getattr(promised, "__func__", promised))
        return attribute if function is attribute.__func__ else type(attribute)(function)
    function = getattr(promised, "__func__", promised)
    if not inspect.isfunction(attribute) or not inspect.isfunction(function):
        return attribute
    return _without_unknown(attribute, function)


def _without_unknown(function: Callable[..., Any], promised: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function
    names = {parameter.name for parameter in parameters}
    unknown = frozenset(
        parameter.name
        for parameter in inspect.signature(promised).parameters.values()
        if parameter.kind in _OPTIONAL
        and parameter.default is not inspect.Parameter.empty
        and parameter.name not in names
    )
    if not unknown:
        return function
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    max_positional = None if takes_any else sum(parameter.kind in _POSITIONAL for parameter in parameters)

    @functools.wraps(function)
    def method(*arguments: Any, **keywords: Any) -> Any:
        return function(
            *arguments[:max_positional], **{name: value for name, value in keywords.items() if name not in unknown}
        )

    return method
