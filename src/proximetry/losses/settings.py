"""Settings of losses, each declared once with its validation, description and default.

    class NormSoftmax(ProxyLoss, name="norm_softmax"):
        scale: float = setting(positive, "scale λ", default=20.0)

The constructor, the validation of assignments and recipes, and the tables in the documentation
are generated from these declarations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, replace
from inspect import Parameter, Signature, get_annotations
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from torch import Tensor, nn

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value

#: Settings above this, or positive ones below its inverse, overflow float32 in a loss.
MAX_VALUE = 1e30
REQUIRED: Any = Parameter.empty

T = TypeVar("T")


@dataclass(frozen=True)
class Check(Generic[T]):
    """Validates and converts a value, or raises a ValueError with the name of the setting."""

    kind: str
    """The accepted type, for documentation."""
    expected: str
    """The accepted values, for the error message."""
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], T]

    def __call__(self, name: str, value: Any) -> T:
        """Return the validated value."""
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.expected}, got {value!r}")
        return self.convert(value)


def number(kind: str, low: float, high: float, expected: str) -> Check[float]:
    """Return a check that accepts real numbers from ``low`` to ``high`` as floats."""

    def accepts(value: Any) -> bool:
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        return is_real and low <= float(value) <= high

    return Check(kind, expected, accepts, float)


finite = number("float", -MAX_VALUE, MAX_VALUE, f"a finite number of at most {MAX_VALUE:g}")
positive = number("float > 0", 1 / MAX_VALUE, MAX_VALUE, f"positive and at most {MAX_VALUE:g}")
non_negative = number("float ≥ 0", 0.0, MAX_VALUE, f"between 0 and {MAX_VALUE:g}")
cosine_margin = number("−2 ≤ float ≤ 2", -2.0, 2.0, "between -2 and 2")
at_least_one = number("float ≥ 1", 1.0, MAX_VALUE, f"between 1 and {MAX_VALUE:g}")
fraction = number("0 ≤ float ≤ 1", 0.0, 1.0, "between 0 and 1")
share = number("0 < float ≤ 1", 1 / MAX_VALUE, 1.0, "above 0 and at most 1")
similarity = number("−1 ≤ float ≤ 1", -1.0, 1.0, "between -1 and 1")
angle = number(
    "0 ≤ float < π", 0.0, math.nextafter(math.pi, 0.0), "an angle in radians from 0 to below π"
)
count = Check(
    "int ≥ 1",
    "an integer of at least 1",
    lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1,
    int,
)
boolean = Check("bool", "true or false", lambda value: isinstance(value, bool), bool)


def one_of(*choices: str) -> Check[str]:
    """Return a check that accepts ``choices`` only."""
    kind = ", ".join(f'"{choice}"' for choice in choices)
    expected = f"one of {', '.join(map(repr, choices))}"
    return Check(kind, expected, lambda value: value in choices, str)


def optional(inner: Check[T]) -> Check[T | None]:
    """Return a check that also accepts None."""
    return Check(
        f"{inner.kind} or None",
        f"{inner.expected}, or None",
        lambda value: value is None or inner.accepts(value),
        lambda value: None if value is None else inner.convert(value),
    )


@dataclass(frozen=True)
class Setting:
    """One argument of a loss."""

    check: Check[Any]
    help: str
    default: Any = REQUIRED
    last: bool = False
    """Whether the argument is listed after the others."""
    alias: str | None = None
    """The public name, if this attribute stores the value of a property."""
    is_constant: bool = False
    """Whether the argument cannot be changed after construction."""


def setting(check: Check[Any], help: str, default: Any = REQUIRED, **options: Any) -> Any:
    """Declare an argument in the body of a loss, in the order of the constructor.

    It becomes an attribute that is validated on assignment or, if annotated as ``InitVar[…]``, an
    argument of `ConfigurableModule.build`. Options: ``last`` and ``alias`` of `Setting`.
    """
    return Setting(check, help, default, **options)


LOSS_SETTINGS: dict[str, dict[str, Setting]] = {}
"""The settings of every loss by its name in recipes: proxy losses and ``"pairs/<name>"``."""


def loss_settings(name: str) -> dict[str, Setting]:
    """Return the settings of a loss by name: a proxy loss or ``"pairs/<name>"``."""
    if name not in LOSS_SETTINGS:
        raise UsageError(f"unknown loss {format_value(name)}{suggest(name, LOSS_SETTINGS)}")
    return LOSS_SETTINGS[name]


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown loss, setting or invalid value."""
    validate(f"loss {name!r}", loss_settings(name), settings)


def validate(
    owner: str, declarations: Mapping[str, Setting], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings as stored; raise for unknown names and invalid values."""
    for name in values:
        if name not in declarations:
            raise ValueError(_unknown_setting(owner, name, declarations))
    return {name: declarations[name].check(name, value) for name, value in values.items()}


def _unknown_setting(owner: str, name: str, declarations: Mapping[str, Setting]) -> str:
    if not declarations:
        return f"{owner} has no settings, got {name!r}"
    return f"{owner} has no setting {name!r}{suggest(name, declarations)}"


class FullPrecision(nn.Module):
    """A module whose parameters and buffers never become narrower than float32.

    ``half()``, ``bfloat16()`` and ``to(dtype)`` do not convert them; ``double()`` does.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def in_full_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_half = result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device) if is_half else result

        super()._apply(in_full_precision, recurse)  # type: ignore[no-untyped-call]
        return self


@dataclass_transform(eq_default=False, field_specifiers=(setting,))
class ConfigurableModule(FullPrecision):
    """A module whose constructor is generated from the settings that its class declares.

    Subclasses inherit settings; a redeclared setting keeps its position.
    """

    __signature__: ClassVar[Signature] = Signature()
    _arguments: ClassVar[dict[str, Setting]] = {}
    optional_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that only some subclasses declare; assigning one on other subclasses raises."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._arguments = dict(cls._arguments)
        parameters = dict(cls.__signature__.parameters)
        annotations = get_annotations(cls)
        for attribute, value in list(vars(cls).items()):
            if not isinstance(value, Setting):
                continue
            delattr(cls, attribute)
            name = value.alias or attribute
            annotation = annotations.get(attribute, REQUIRED)
            cls._arguments[name] = replace(value, is_constant="InitVar[" in str(annotation))
            parameters[name] = Parameter(
                name,
                # num_classes and dim are required, and may be positional.
                Parameter.POSITIONAL_OR_KEYWORD
                if value.default is REQUIRED
                else Parameter.KEYWORD_ONLY,
                default=value.default,
                annotation=annotation.type if isinstance(annotation, InitVar) else annotation,
            )
        order = sorted(parameters.values(), key=lambda p: (p.kind, cls._arguments[p.name].last))
        cls.__signature__ = Signature(order)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        owner = type(self).__name__
        for name in kwargs:
            if name not in self._arguments:
                raise TypeError(_unknown_setting(owner, name, self._arguments))
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{owner}: {error}") from None
        bound.apply_defaults()
        arguments = validate(owner, self._arguments, bound.arguments)
        self._built_with = arguments
        self.build(arguments)
        for name, value in arguments.items():
            if self._arguments[name].is_constant:
                self.__dict__[name] = value
            else:
                setattr(self, name, value)

    def build(self, arguments: dict[str, Any]) -> None:
        """Create parameters, buffers and submodules."""

    def rebuild(self, **changes: Any) -> Self:
        """Return a new module with the arguments of this one, except for the changes."""
        return type(self)(**self._built_with | changes)

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return the settings by name, in the order of the constructor."""
        arguments = {name: cls._arguments[name] for name in cls.__signature__.parameters}
        return {name: entry for name, entry in arguments.items() if entry.default is not REQUIRED}

    def extra_repr(self) -> str:
        """Return the settings, for ``print(loss)``."""
        variable = [name for name, entry in self.settings().items() if not entry.is_constant]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in variable)

    def __setattr__(self, name: str, value: Any) -> None:
        declaration = self._arguments.get(name)
        if declaration is not None:
            if declaration.is_constant:
                raise AttributeError(f"{name} cannot be changed. Create another loss.")
            value = declaration.check(name, value)
        elif name in self.optional_settings:
            raise AttributeError(_unknown_setting(type(self).__name__, name, self._arguments))
        super().__setattr__(name, value)
