"""Vector operations that numba's loops cannot express: loops that keep several sums in registers.

The loops are LLVM code for the width of this machine's registers. On short rows (64 floats) they reach the processor's
peak (118 GFLOP/s on a core with AVX-512, float32). Loops that LLVM vectorizes have half of this speed: they sum
the numbers within a register, and every call checks whether arrays overlap and computes a remainder.

All arrays are float32 with unit stride along the row. Widths are multiples of `PAD`, a multiple of the registers'
width, so that there is no remainder. Bounds are not checked. The processor is the target for which numba compiles:
this machine, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.core.registry import cpu_target
from numba.np import arrayobj

from fasttrain_kernels.jit import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.context import Context
    from numba.core.typing.templates import Signature

    from fasttrain_kernels.jit import Code, Values

    Kind = types.Type  # numba's type of an argument

cgutils: Any = untyped_cgutils


class Tile(NamedTuple):
    """A block of a matrix product: its sums stay in registers."""

    lanes: int  # floats in a register
    height: int  # rows
    vectors: int  # registers in a row of the tile

    @classmethod
    def of(cls, triple: str, features: str) -> Tile:
        """The tile for a processor, by LLVM's triple and features. Sums and operands use nearly all registers. At least
        eight sums are needed to hide the latency of a multiply-add (4 cycles, and two start in each cycle).

        AVX2 has 16 registers: 4 × 2 reaches 91 to 95 of a core's 96 GFLOP/s; 8 × 1 loads too much and reaches 44.
        """
        has = set(features.split(","))
        if triple.startswith(("aarch64", "arm64")):
            return cls(4, 8, 2)  # 32 registers
        if "+avx512f" in has:
            return cls(16, 8, 2)  # 32 registers
        return cls(8 if "+avx" in has else 4, 4, 2)


PAD = 16  # floats: one AVX-512 register, or two AVX2 registers, or four NEON registers
_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
LANES, TILE_HEIGHT, TILE_VECTORS = Tile.of(_TRIPLE, _FEATURES)
TILE_ROWS = 8  # batches are padded to multiples of 8 rows: one or two tiles, depending on the processor
PANEL = 4096  # floats of a matrix that a product copies at once: 16 KB, half of the L1 cache
GROUP = 16  # entries that `nonzero_bits` reads
STRIP_VECTORS = 8  # registers with a row's sums in `sum_rows`

_INDEX, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_LANES = range(LANES)
_RELAXED = ("contract", "reassoc", "nsz")


class _Code:
    """Helpers to write LLVM code: arguments as pointers and strides, vector loads, sums in registers."""

    def __init__(self, context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> None:
        self.context, self.builder = context, builder
        self.signature, self.arguments = signature, arguments

    def pointer(self, position: int, row: ir.Value | None = None, column: ir.Value | None = None) -> ir.Value:
        """Address of element (row, column), or (column,), of the array argument at `position`."""
        array = self._array(position)
        strides = cgutils.unpack_tuple(self.builder, array.strides)
        offset = self.number(0)
        for index, stride in zip((column,) if row is None else (row, column), strides, strict=True):
            offset = self.builder.add(offset, self.builder.mul(index, stride))
        return cgutils.pointer_add(self.builder, array.data, offset, array.data.type)

    def stride(self, position: int, axis: int) -> ir.Value:
        """Bytes from one element to the next along `axis`."""
        return cgutils.unpack_tuple(self.builder, self._array(position).strides)[axis]

    def row_number(self, m: ir.Value) -> ir.Value:
        """Entry m of the int32 argument at position 1."""
        return self.builder.sext(self.builder.load(self.pointer(1, column=m)), _INDEX)

    def along(self, pointer: ir.Value, size_bytes: ir.Value) -> ir.Value:
        return cgutils.pointer_add(self.builder, pointer, size_bytes, pointer.type)

    def load(self, pointer: ir.Value, vector: int = 0) -> ir.Value:
        """Load LANES floats that begin `vector` registers after the pointer."""
        return self.builder.load(self._as_vector(pointer, vector), align=4)

    def store(self, value: ir.Value, pointer: ir.Value, vector: int = 0) -> None:
        self.builder.store(value, self._as_vector(pointer, vector), align=4)

    def splat(self, number: ir.Value) -> ir.Value:
        """A vector with the number in every lane."""
        nothing = ir.Constant(_VECTOR, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, nothing, zeros)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_RELAXED), c, flags=_RELAXED)

    def sum(self, value: ir.Value) -> ir.Value:
        """Sum over the lanes."""
        for half in (LANES // 2**n for n in range(1, LANES.bit_length())):
            lanes = [(lane + half) % LANES for lane in range(LANES)]
            other = self.builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes))
            value = self.builder.fadd(value, other, flags=_RELAXED)
        return self.builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    def interleaved(self, a: ir.Value, b: ir.Value, begin: int) -> ir.Value:
        """Lanes from `begin` on of a and b in turn: a[begin], b[begin], a[begin + 1], …"""
        lanes = [lane + of * LANES for lane in range(begin, begin + LANES // 2) for of in (0, 1)]
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes))

    def cell(self, value: ir.Value) -> ir.Value:
        """A variable that begins as `value`; LLVM keeps it in a register."""
        return cgutils.alloca_once_value(self.builder, value)

    @contextmanager
    def loop(self, begin: ir.Value, end: ir.Value) -> Iterator[ir.Value]:
        with cgutils.for_range_slice(self.builder, begin, end, self.number(1), _INDEX) as (index, _):
            yield index

    def number(self, value: int) -> ir.Value:
        return ir.Constant(_INDEX, value)

    def shape(self, position: int) -> list[ir.Value]:
        """Shape of the array argument at `position`."""
        return cgutils.unpack_tuple(self.builder, self._array(position).shape)  # type: ignore[no-any-return]

    def _array(self, position: int) -> ir.Value:
        kind = self.signature.args[position]
        return self.context.make_array(kind)(self.context, self.builder, self.arguments[position])

    def _as_vector(self, pointer: ir.Value, vector: int) -> ir.Value:
        moved = self.builder.gep(pointer, [self.number(vector * LANES)])
        return self.builder.bitcast(moved, _VECTOR.as_pointer())


def as_generator(write: Callable[[_Code], ir.Value | None]) -> Callable[..., ir.Value]:
    """`write` as a function with the arguments that numba passes to an intrinsic's code generator."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        value = write(_Code(context, builder, signature, arguments))
        return context.get_dummy_value() if value is None else value

    return generate


def _tile(vectors: int) -> Any:
    """An intrinsic that computes a tile of `vectors` registers per row."""

    @intrinsic
    def tile(typing: Context, a: Kind, i: Kind, b: Kind, j: Kind, start: Kind, down: Kind, out: Kind) -> Code:
        """out[i:i+height, j:j+width] = start[i:i+height, j:j+width] + a[i:i+height] @ b[:, j:j+width].

        `down` is 1, or 0 if `start` has one row, used for all rows. The rows of `a` may be strided. `out` may be the
        same array as `start`.
        """

        def write(code: _Code) -> None:
            _write_tile(code, vectors)

        return types.void(a, types.int64, b, types.int64, start, types.int64, out), as_generator(write)

    return tile


def _write_tile(code: _Code, vectors: int) -> None:
    builder, (_, row, _, column, _, down, _) = code.builder, code.arguments
    numbers = [builder.add(row, code.number(r)) for r in range(TILE_HEIGHT)]
    a_rows = [code.pointer(0, number, code.number(0)) for number in numbers]
    starts = [code.pointer(4, code.builder.mul(number, down), column) for number in numbers]
    sums = [[code.cell(code.load(start, v)) for v in range(vectors)] for start in starts]
    along, across, b_start = code.stride(0, 1), code.stride(2, 0), code.pointer(2, code.number(0), column)
    with code.loop(code.number(0), code.shape(2)[0]) as k:
        b_row = code.along(b_start, code.builder.mul(k, across))
        b_vectors = [code.load(b_row, v) for v in range(vectors)]
        for a_row, cells in zip(a_rows, sums, strict=True):
            x = code.splat(code.builder.load(code.along(a_row, code.builder.mul(k, along))))
            for cell, b_vector in zip(cells, b_vectors, strict=True):
                builder.store(code.multiply_add(x, b_vector, builder.load(cell)), cell)
    for number, cells in zip(numbers, sums, strict=True):
        target = code.pointer(6, number, column)
        for v, cell in enumerate(cells):
            code.store(builder.load(cell), target, v)


def _gather(vectors: int) -> Any:
    @intrinsic
    def sum_rows(
        typing: Context, values: Kind, rows: Kind, begin: Kind, end: Kind, w: Kind, j: Kind, start: Kind, out: Kind
    ) -> Code:
        """out[j:j+width] = start[j:j+width] + values[begin:end] @ w[rows[begin:end], j:j+width]."""

        def write(code: _Code) -> None:
            builder = code.builder
            begin, end, j = code.arguments[2], code.arguments[3], code.arguments[5]
            begun, target = code.pointer(6, column=j), code.pointer(7, column=j)
            sums = [code.cell(code.load(begun, v)) for v in range(vectors)]
            with code.loop(begin, end) as m:
                value = code.splat(code.builder.load(code.pointer(0, column=m)))
                w_row = code.pointer(4, code.row_number(m), j)
                for v, cell in enumerate(sums):
                    builder.store(code.multiply_add(value, code.load(w_row, v), builder.load(cell)), cell)
            for v, cell in enumerate(sums):
                code.store(builder.load(cell), target, v)

        index = types.int64
        return types.void(values, rows, index, index, w, index, start, out), as_generator(write)

    return sum_rows


def _scatter(vectors: int) -> Any:
    @intrinsic
    def add_to_rows(
        typing: Context, values: Kind, rows: Kind, begin: Kind, end: Kind, d: Kind, j: Kind, out: Kind
    ) -> Code:
        """out[rows[begin:end], j:j+width] += outer(values[begin:end], d[j:j+width])."""

        def write(code: _Code) -> None:
            begin, end, j = code.arguments[2], code.arguments[3], code.arguments[5]
            source = code.pointer(4, column=j)
            d_vectors = [code.load(source, v) for v in range(vectors)]
            with code.loop(begin, end) as m:
                value = code.splat(code.builder.load(code.pointer(0, column=m)))
                row = code.pointer(6, code.row_number(m), j)
                for v, d_vector in enumerate(d_vectors):
                    code.store(code.multiply_add(value, d_vector, code.load(row, v)), row, v)

        return types.void(values, rows, types.int64, types.int64, d, types.int64, out), as_generator(write)

    return add_to_rows


@intrinsic
def panel(typing: Context) -> Code:
    """(PANEL,) floats on the caller's stack, not initialised."""

    def write(code: _Code) -> ir.Value:
        builder = code.builder
        data = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, PANEL))
        array = code.context.make_array(code.signature.return_type)(code.context, builder)
        size, item = ir.Constant(_INDEX, PANEL), ir.Constant(_INDEX, 4)
        start = builder.bitcast(data, _FLOAT.as_pointer())
        populate: Any = arrayobj.populate_array
        populate(array, data=start, shape=[size], strides=[item], itemsize=item, meminfo=None)
        return array._getvalue()

    return types.Array(types.float32, 1, "C")(), as_generator(write)


@intrinsic
def copy_panel(typing: Context, b: Kind, first: Kind, j: Kind, out: Kind) -> Code:
    """out[:, :] = b[first:first+depth, j:j+width], for out (depth, width), width a multiple of `LANES`."""

    def write(code: _Code) -> None:
        builder, (_, first, column, _) = code.builder, code.arguments
        depth, width = code.shape(3)
        vectors, size = builder.sdiv(width, code.number(LANES)), code.number(4 * LANES)
        b_start, out_start = code.pointer(0, first, column), code.pointer(3, code.number(0), code.number(0))
        b_down, out_down = code.stride(0, 0), code.stride(3, 0)
        with code.loop(code.number(0), depth) as c:
            b_row = code.along(b_start, builder.mul(c, b_down))
            out_row = code.along(out_start, builder.mul(c, out_down))
            with code.loop(code.number(0), vectors) as v:
                at = builder.mul(v, size)
                code.store(code.load(code.along(b_row, at)), code.along(out_row, at))

    return types.void(b, types.int64, types.int64, out), as_generator(write)


@intrinsic
def dot_rows(typing: Context, w: Kind, rows: Kind, begin: Kind, end: Kind, h: Kind, size: Kind, out: Kind) -> Code:
    """out[m - begin] = dot(w[rows[m]], h[:size]) for m from begin to end."""

    def write(code: _Code) -> None:
        builder = code.builder
        begin, end, size = code.arguments[2], code.arguments[3], code.arguments[5]
        vectors = builder.sdiv(size, code.number(LANES))
        h_start, width = code.pointer(4, column=code.number(0)), code.number(4 * LANES)
        total = code.cell(ir.Constant(_VECTOR, [0.0] * LANES))
        with code.loop(begin, end) as m:
            w_row = code.pointer(0, code.row_number(m), code.number(0))
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
            with code.loop(code.number(0), vectors) as v:
                at = code.builder.mul(v, width)
                product = code.multiply_add(code.load(code.along(w_row, at)), code.load(code.along(h_start, at)),
                                            builder.load(total))  # fmt: skip
                builder.store(product, total)
            builder.store(code.sum(builder.load(total)), code.pointer(6, column=builder.sub(m, begin)))

    return types.void(w, rows, types.int64, types.int64, h, types.int64, out), as_generator(write)


@intrinsic
def transpose_tile(typing: Context, a: Kind, at: Kind, down: Kind, out: Kind, to: Kind, across: Kind) -> Code:
    """out[to + c × across + r] = a[at + r × down + c] for r and c below `LANES`; a and out are flat arrays.

    A matrix of 256 × 256 takes 14 µs; with moves of single numbers it takes 100 µs.
    """

    def write(code: _Code) -> None:
        add, (_, at, down, _, to, across) = code.builder.add, code.arguments
        rows = [code.load(code.pointer(0, column=add(at, code.builder.mul(code.number(r), down)))) for r in _LANES]
        for _ in range(LANES.bit_length() - 1):  # each pass interleaves the two halves of the rows
            pairs = [(rows[r], rows[r + LANES // 2]) for r in range(LANES // 2)]
            rows = [code.interleaved(*pair, begin) for pair in pairs for begin in (0, LANES // 2)]
        for c in _LANES:
            code.store(rows[c], code.pointer(3, column=add(to, code.builder.mul(code.number(c), across))))

    return types.void(a, types.int64, types.int64, out, types.int64, types.int64), as_generator(write)


@intrinsic
def nonzero_bits(typing: Context, x: Kind, at: Kind) -> Code:
    """A number with bit n set if x[at + n] is not zero, for n below `GROUP`; for contiguous float32 and bool arrays."""

    def write(code: _Code) -> ir.Value:
        builder = code.builder
        start = code.pointer(0, column=code.arguments[1])
        item = start.type.pointee
        group = builder.load(builder.bitcast(start, ir.VectorType(item, GROUP).as_pointer()), align=1)
        if item == _FLOAT:
            bits = builder.fcmp_unordered("!=", group, ir.Constant(group.type, [0.0] * GROUP))
        else:
            bits = builder.icmp_unsigned("!=", group, ir.Constant(group.type, [0] * GROUP))
        return builder.zext(builder.bitcast(bits, ir.IntType(GROUP)), _INDEX)

    return types.int64(x, types.int64), as_generator(write)


@intrinsic
def lowest_bit(typing: Context, bits: Kind) -> Code:
    """Position of the lowest set bit of a number that is not zero."""

    def write(code: _Code) -> ir.Value:
        return code.builder.cttz(code.arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), as_generator(write)


@intrinsic
def count_bits(typing: Context, bits: Kind) -> Code:
    """The number of set bits."""

    def write(code: _Code) -> ir.Value:
        return code.builder.ctpop(code.arguments[0])

    return types.int64(types.int64), as_generator(write)


wide_tile, narrow_tile = _tile(TILE_VECTORS), _tile(1)
sum_wide_strip, sum_half_strip, sum_narrow_strip = _gather(STRIP_VECTORS), _gather(4), _gather(1)
add_to_wide_strip, add_to_half_strip, add_to_narrow_strip = _scatter(STRIP_VECTORS), _scatter(4), _scatter(1)
