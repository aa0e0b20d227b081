"""Expressions of Mats, evaluated when they are stored: `m.assign(a + b * 2 - c.t())`.

An operator computes nothing. The operator only checks types and sizes, and makes a `MatExpr`: a tree whose leaves are
numbers and headers of Mats, with a type and a size. Storing a `MatExpr` (`Mat(e)`, `m.assign(e)`, `m[...] = e`,
`e.to_mat()`, or passing it as a Mat) evaluates the tree as a whole (`evaluation.py`): as if in float64, with the
result rounded and saturated once, at the end.

Source of names and meanings: `cv::MatExpr` of OpenCV, modules/core/src/matrix_expressions.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor, device

from rooftop.launch import trees
from rooftop.mat.allocation import same_device
from rooftop.mat.blocks import block_on
from rooftop.mat.headers import Sizes
from rooftop.mat.interchange import is_foreign
from rooftop.mat.scalars import ScalarLike, numbers_of
from rooftop.mat.type_codes import (
    CV_8U,
    CV_16BF,
    CV_16F,
    CV_32F,
    CV_64F,
    CV_MAKETYPE,
    CV_MAT_CN,
    DEPTHS,
    typeToString,
)
from rooftop.mat.views import Header, Shaped

if TYPE_CHECKING:
    from rooftop.mat.matrix import Mat  # only for annotations: `matrix.py` imports this module

ELEMENTWISE = ("add", "sub", "mul", "div", "min", "max", "abs", "neg")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BITWISE = ("and", "or", "xor", "not")
INVERSES = ("lu", "cholesky", "svd")
FLOATING = (CV_32F, CV_64F, CV_16F, CV_16BF)
Operand = Any  # a Mat, an expression, an array, or numbers; for anything else, operators return NotImplemented


class Arithmetic:
    """The operators of Mats and of expressions."""

    __slots__ = ()
    __array_priority__ = 1000  # NumPy leaves `array + mat` to this class

    def __add__(self, other: Operand) -> MatExpr:
        return _binary("add", self, other)

    def __radd__(self, other: Operand) -> MatExpr:
        return _binary("add", other, self)

    def __sub__(self, other: Operand) -> MatExpr:
        return _binary("sub", self, other)

    def __rsub__(self, other: Operand) -> MatExpr:
        return _binary("sub", other, self)

    def __mul__(self, other: Operand) -> MatExpr:
        """Multiply by numbers element by element, or by another Mat as a matrix product, as in OpenCV. `mul` multiplies
        two Mats element by element.
        """
        return _binary("mul" if _are_numbers(other) else "product", self, other)

    def __rmul__(self, other: Operand) -> MatExpr:
        return _binary("mul" if _are_numbers(other) else "product", other, self)

    def __matmul__(self, other: Operand) -> MatExpr:
        """The matrix product."""
        return NotImplemented if _are_numbers(other) else _binary("product", self, other)

    def __rmatmul__(self, other: Operand) -> MatExpr:
        return NotImplemented if _are_numbers(other) else _binary("product", other, self)

    def __truediv__(self, other: Operand) -> MatExpr:
        """The quotient, element by element. In integer depths, division by 0 gives 0; floating depths follow IEEE
        754."""
        return _binary("div", self, other)

    def __rtruediv__(self, other: Operand) -> MatExpr:
        return _binary("div", other, self)

    def __neg__(self) -> MatExpr:
        return _unary("neg", self)

    def __abs__(self) -> MatExpr:
        return _unary("abs", self)

    def __and__(self, other: Operand) -> MatExpr:
        return _binary("and", self, other)

    def __rand__(self, other: Operand) -> MatExpr:
        return _binary("and", other, self)

    def __or__(self, other: Operand) -> MatExpr:
        return _binary("or", self, other)

    def __ror__(self, other: Operand) -> MatExpr:
        return _binary("or", other, self)

    def __xor__(self, other: Operand) -> MatExpr:
        return _binary("xor", self, other)

    def __rxor__(self, other: Operand) -> MatExpr:
        return _binary("xor", other, self)

    def __invert__(self) -> MatExpr:
        return _unary("not", self)

    def __lt__(self, other: Operand) -> MatExpr:
        """Compare element by element: 255 where true and 0 where false, in CV_8U. All comparisons do this."""
        return _binary("lt", self, other)

    def __le__(self, other: Operand) -> MatExpr:
        return _binary("le", self, other)

    def __gt__(self, other: Operand) -> MatExpr:
        return _binary("gt", self, other)

    def __ge__(self, other: Operand) -> MatExpr:
        return _binary("ge", self, other)

    def __eq__(self, other: Operand) -> MatExpr:  # type: ignore[override]
        return _binary("eq", self, other)

    def __ne__(self, other: Operand) -> MatExpr:  # type: ignore[override]
        return _binary("ne", self, other)

    __hash__ = object.__hash__

    def mul(self, other: Operand, scale: float = 1) -> MatExpr:
        """scale * self * other, element by element."""
        found = _binary("mul", self, other)
        if found is NotImplemented:
            raise TypeError(f"mul takes a Mat, an expression, an array or numbers, got {type(other).__name__}")
        return found if scale == 1 else found * scale

    def t(self) -> MatExpr:
        """The transpose.

        Raises:
            ValueError: the expression does not have two dimensions.
        """
        return _transposed(as_expression(self))

    def inv(self, method: Literal["lu", "cholesky", "svd"] = "lu") -> MatExpr:
        """The inverse of a square floating-point matrix; with "svd" the pseudo-inverse of any matrix.

        The evaluation raises numpy's LinAlgError if the matrix has no inverse ("lu") or is not positive definite
        ("cholesky"). OpenCV returns zeros instead of raising an error.
        """
        return _inverse(as_expression(self), method)


class MatExpr(Arithmetic, Shaped):
    """An expression to be computed, with its type and size. Operators of Mats create expressions; users do not.

    Each use evaluates the expression again, from the present contents of its Mats. The numbers in the expression are
    copies, made when the expression was built.
    """

    __slots__ = ("_device", "_operands", "_operation", "_sizes", "_type", "_value")

    _operation: str  # "mat", "numbers", one of ELEMENTWISE, COMPARISONS and BITWISE, "product", "inverse"
    _operands: tuple[MatExpr, ...]
    _value: Any  # "mat": (header, transposed); "numbers": a number for each channel; "inverse": the method
    _device: device
    _value_as_mat: ClassVar[Callable[..., Mat]]  # set by `matrix.py`, which defines Mat

    @property
    def device(self) -> device:
        return self._device

    def to_mat(self, rtype: int | None = None) -> Mat:
        """Evaluate into a new Mat, converted to the depth of `rtype` if that is given."""
        return self._value_as_mat(rtype)

    def clone(self) -> Mat:
        """Evaluate into new memory, as `to_mat()` does."""
        return self.to_mat()

    def dot(self, other: Operand) -> float:
        """Evaluate, then call `Mat.dot`."""
        return self.to_mat().dot(other)

    def cross(self, other: Operand) -> Mat:
        """Evaluate, then call `Mat.cross`."""
        return self.to_mat().cross(other)

    def copyTo(self, dst: Mat | None = None, mask: Any = None) -> Mat:
        """Evaluate into `dst`, like `Mat.copyTo`. With a mask, the value is first computed in new memory."""
        return self.to_mat().copyTo(dst, mask) if dst is None or mask is not None else dst.assign(self)

    def convertTo(self, rtype: Any = None, alpha: float = 1, beta: float = 0, dst: Mat | None = None) -> Mat:
        """Evaluate, then convert as `Mat.convertTo` does."""
        return self.to_mat().convertTo(rtype, alpha, beta, dst)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Evaluate, and return the value as an array like `Mat.numpy`."""
        return self.to_mat().numpy()

    def tensor(self, layout: Literal["hwc", "chw"] = "hwc") -> Tensor:
        """Evaluate, and return the value as a tensor like `Mat.tensor`."""
        return self.to_mat().tensor(layout)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("an expression has no memory, so its array is always a copy")
        return np.asarray(self.to_mat().numpy(), dtype)

    def __getitem__(self, index: Any) -> Any:
        """The element or the view of the value that `index` selects. This evaluates the whole expression."""
        return self.to_mat()[index]

    def __bool__(self) -> bool:
        raise TypeError("an expression of Mats has one value for each element, so it has no single truth value")

    def __repr__(self) -> str:
        sizes = " x ".join(map(str, self._sizes)) or "empty"
        return f"MatExpr({sizes} {typeToString(self._type)}, {self._device}: {_text(self)})"


def minimum(a: Operand, b: Operand) -> MatExpr:
    """Element-wise minimum of two operands; NaN where either is NaN."""
    return _of_two("min", a, b)


def maximum(a: Operand, b: Operand) -> MatExpr:
    """Element-wise maximum of two operands; NaN where either is NaN."""
    return _of_two("max", a, b)


def absolute(a: Mat | MatExpr) -> MatExpr:
    """|a|, element by element; `abs(a)` does the same."""
    return _unary("abs", as_expression(a))


def absdiff(a: Operand, b: Operand) -> MatExpr:
    """|a - b|, element by element."""
    return abs(_of_two("sub", a, b))


# ---- trees -----------------------------------------------------------------------------------------------------


def node(
    operation: str, operands: tuple[MatExpr, ...], type: int, sizes: Sizes, where: device, value: Any = None
) -> MatExpr:
    """Make a node of an expression tree."""
    new = MatExpr.__new__(MatExpr)
    new._operation, new._operands, new._value = operation, operands, value
    new._type, new._sizes, new._device = type, sizes, where
    return new


def leaf(m: Header) -> MatExpr:
    """Make a leaf for a Mat. The leaf copies the Mat's header, so later changes of that header do not affect the
    leaf."""
    return node("mat", (), m._type, m._sizes, m._device, (m._header_of_itself(), False))


def topological(root: MatExpr) -> list[MatExpr]:
    """All nodes of an expression tree, each once. Operands come before the nodes that use them."""
    return trees.topological([root], _OPERANDS)


_OPERANDS: Callable[[MatExpr], tuple[MatExpr, ...]] = attrgetter("_operands")


def rebuilt(root: MatExpr, change: Callable[[MatExpr, tuple[MatExpr, ...]], MatExpr | None]) -> MatExpr:
    """The expression tree `root` with some nodes replaced. `change` gets each node with its new operands, and returns
    the node's replacement, or None to keep the operation of the node."""
    new: dict[int, MatExpr] = {}
    for each in topological(root):
        operands = tuple(new[id(operand)] for operand in each._operands)
        found = change(each, operands)
        if found is None:
            same = all(a is b for a, b in zip(operands, each._operands, strict=True))
            found = each if same else with_operands(each, operands)
        new[id(each)] = found
    return new[id(root)]


def same_number(a: float, b: float) -> bool:
    """Whether two numbers are equal, including the sign of zero; NaN equals NaN."""
    return (a == b and (a != 0 or math.copysign(1.0, a) == math.copysign(1.0, b))) or (a != a and b != b)


def is_one(each: MatExpr) -> bool:
    """Whether a node of an expression tree is a single number, which all channels share."""
    return each._operation == "numbers" and all(same_number(value, each._value[0]) for value in each._value)


def with_operands(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr:
    """A node with the same operation as `each`, on other operands."""
    return node(each._operation, operands, each._type, each._sizes, each._device, each._value)


# ---- building --------------------------------------------------------------------------------------------------


def _are_numbers(value: Any) -> bool:
    """Whether an operand is treated as numbers, not as a Mat: a number, a tuple, a Scalar, or an array of at most one
    dimension."""
    if isinstance(value, (bool, int, float, np.generic, tuple, list)):
        return True
    return isinstance(value, (np.ndarray, Tensor)) and value.ndim <= 1


def as_expression(value: Any) -> MatExpr:
    """Convert a Mat or an array to an expression; return an expression unchanged.

    Raises:
        TypeError: the value is not a Mat, an array or an expression.
    """
    if isinstance(value, MatExpr):
        return value
    if isinstance(value, Header):
        return leaf(value)
    if is_foreign(value):
        return leaf(block_on(value))
    raise TypeError(f"expected a Mat or an expression, got {type(value).__name__}")


def _unary(operation: str, value: Any) -> MatExpr:
    operand = as_expression(value)
    if operation == "not":
        _check_bits(operand)
    return node(operation, (operand,), operand._type, operand._sizes, operand._device)


def _of_two(operation: str, a: Operand, b: Operand) -> MatExpr:
    """Build an operation on two operands, with the same type and size checks as the operators."""
    if _are_numbers(a) and _are_numbers(b):
        raise TypeError("both operands are numbers: one of them must be a Mat or an expression")
    found = _binary(operation, a, b)
    if found is NotImplemented:
        raise TypeError(f"expected Mats, expressions or numbers, got {type(a).__name__} and {type(b).__name__}")
    return found


def _binary(operation: str, a: Any, b: Any) -> MatExpr:
    for each in (a, b):
        if not (isinstance(each, Arithmetic) or _are_numbers(each) or is_foreign(each)):
            return NotImplemented
    if _are_numbers(a):
        right = as_expression(b)
        left = _numbers(a, right)
    else:
        left = as_expression(a)
        right = _numbers(b, left) if _are_numbers(b) else as_expression(b)
    if not same_device(left._device, right._device):
        raise ValueError(
            f"Mats on {left._device} and {right._device} in one expression: move one of them with to(device)"
        )
    if operation == "product":
        return _product(left, right)
    if left._type != right._type:
        raise TypeError(
            f"{_WORDS[operation]} takes two Mats of the same type, got {typeToString(left._type)} and "
            f"{typeToString(right._type)}: convertTo one of them"
        )
    if left._sizes != right._sizes:
        raise ValueError(
            f"{_WORDS[operation]} takes two Mats of the same size, got {_sizes(left)} and {_sizes(right)}: Mats are "
            "not broadcast"
        )
    type = left._type
    if operation in BITWISE:
        _check_bits(left)
        for each in (left, right):
            if each._operation == "numbers" and not all(float(number).is_integer() for number in each._value):
                raise TypeError(f"bitwise operations need integers, got {each._value}")
    elif operation in COMPARISONS:
        type = CV_MAKETYPE(CV_8U, CV_MAT_CN(type))
    return node(operation, (left, right), type, left._sizes, left._device)


def _numbers(value: ScalarLike, beside: MatExpr) -> MatExpr:
    """A number for each channel, as an operand of an expression."""
    numbers = tuple(numbers_of(value, beside._type))
    return node("numbers", (), beside._type, beside._sizes, beside._device, numbers)


def _check_bits(operand: MatExpr) -> None:
    if DEPTHS[operand.depth()].limits is None and not DEPTHS[operand.depth()].name == "Bool":
        raise TypeError(
            f"bitwise operations need integers, got {typeToString(operand._type)}: compare them, or convertTo an "
            "integer type"
        )


def check_matrix(operand: Shaped, what: str, hint: str) -> None:
    """Check that an operand is a floating-point matrix with one channel.

    Raises:
        TypeError: the operand has more than one channel, or its numbers are not floating point.
        ValueError: the operand does not have two dimensions.
    """
    if operand.depth() not in FLOATING or operand.channels() != 1:
        raise TypeError(
            f"{what} needs one channel of floating-point numbers, got {typeToString(operand._type)}: {hint}"
        )
    if operand.dims != 2:
        raise ValueError(f"{what} needs two dimensions, got {_sizes(operand)}")


def _product(left: MatExpr, right: MatExpr) -> MatExpr:
    for each in (left, right):
        check_matrix(each, "a matrix product", "a.mul(b) multiplies element by element, and convertTo(CV_32F) converts")
    if left._type != right._type:
        raise TypeError(
            f"a matrix product needs two matrices of the same type, got {typeToString(left._type)} and "
            f"{typeToString(right._type)}: convertTo one of them"
        )
    (rows, inner), (inner_too, cols) = left._sizes, right._sizes
    if inner != inner_too:
        raise ValueError(
            f"a product of {_sizes(left)} and {_sizes(right)}: the first must have as many columns as the "
            "second has rows; a.mul(b) multiplies element by element"
        )
    return node("product", (left, right), left._type, (rows, cols), left._device)


def _inverse(operand: MatExpr, method: str) -> MatExpr:
    if method not in INVERSES:
        raise ValueError(f"the method of inv is one of {', '.join(INVERSES)}, got {method!r}")
    check_matrix(operand, "an inverse", "convertTo(CV_32F)")
    rows, cols = operand._sizes
    if rows != cols and method != "svd":
        raise ValueError(f"an inverse needs a square matrix, got {_sizes(operand)}: 'svd' gives the pseudo-inverse")
    return node("inverse", (operand,), operand._type, (cols, rows), operand._device, method)


def _transposed(root: MatExpr) -> MatExpr:
    """Transpose an expression by transposing its leaves, so that no intermediate value is copied."""
    if root.dims != 2:
        raise ValueError(f"t() needs two dimensions, got {_sizes(root)}")
    turned: dict[int, MatExpr] = {}
    for each in topological(root):
        operands = tuple(turned[id(operand)] for operand in each._operands)
        value = each._value
        if each._operation == "mat":
            value = (value[0], not value[1])
        elif each._operation == "product":  # (AB)' = B'A'
            operands = operands[::-1]
        turned[id(each)] = node(each._operation, operands, each._type, each._sizes[::-1], each._device, value)
    return turned[id(root)]


def _sizes(expression: Shaped) -> str:
    return " x ".join(map(str, expression._sizes)) or "an empty Mat"


_WORDS = {
    "add": "a sum",
    "sub": "a difference",
    "mul": "mul",
    "div": "a quotient",
    "min": "a minimum",
    "max": "a maximum",
    "and": "&",
    "or": "|",
    "xor": "^",
    **dict.fromkeys(COMPARISONS, "a comparison"),
}
_SYMBOLS = {
    "add": "+",
    "sub": "-",
    "div": "/",
    "and": "&",
    "or": "|",
    "xor": "^",
    "product": "@",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "mul": "*",
}
_PREFIXES = {"neg": "-", "not": "~"}
_MOST_TEXT = 100


def _text(root: MatExpr) -> str:
    """The expression as text, with Mats named in the order of their use: M0 + (M1 * 2)."""
    names: dict[Any, str] = {}
    texts: dict[int, str] = {}
    for each in topological(root):
        operands = [texts[id(operand)] for operand in each._operands]
        if each._operation == "mat":
            header, transposed = each._value
            name = names.setdefault(header._offset if header._data is None else header.data_ptr(), f"M{len(names)}")
            text = f"{name}.t()" if transposed else name
        elif each._operation == "numbers":
            same = all(number == each._value[0] for number in each._value)
            text = repr(each._value[0] if same else each._value)
        elif each._operation in _SYMBOLS:
            text = f"({operands[0]} {_SYMBOLS[each._operation]} {operands[1]})"
        elif each._operation in _PREFIXES:
            text = f"({_PREFIXES[each._operation]}{operands[0]})"
        else:
            text = f"{each._operation}({', '.join(operands)})"
        texts[id(each)] = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
    text = texts[id(root)]
    return text[1:-1] if text[0] == "(" and text[-1] == ")" else text
