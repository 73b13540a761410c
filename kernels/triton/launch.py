"""Launches of Triton kernels that cost the host little: in a step with a prompt, the GPU would wait for them."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from kernels.triton.plan import INTERPRETED

ALIGNMENT = 16
"""Bytes. Triton compiles other code for a tensor that does not begin at a multiple of it."""

MAX_INT32 = 2**31 - 1


class CachedKernel:
    """A Triton kernel whose compiled variants are found by a short key.

    Triton's own launch binds each argument by name and classifies it, which takes 20 us of Python. A step with a prompt
    has six launches a layer, so the host took longer than the GPU. The parameters of a kernel are tensors, which have
    names in `_ptr`, then numbers, then constants.
    """

    def __init__(self, kernel: Any) -> None:
        """Wrap a function that `triton.jit` has returned."""
        self._kernel = kernel
        self._tensor_count = sum(name.endswith("_ptr") for name in kernel.arg_names)
        numbers = [p for p in kernel.params[self._tensor_count :] if not p.is_constexpr]
        self._key_numbers = [p.num for p in numbers if not p.do_not_specialize]
        """Positions of the numbers for whose values Triton may compile other code."""
        self._other_numbers = [p.num for p in numbers if p.do_not_specialize]
        """Positions of the numbers for which it compiles other code only where they need 64 bits."""
        self._variants: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        """Compiled kernel, and its constants in the order of the parameters, by the key of a launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel: tensors and numbers by position, constants and options by name.

        `grid`: number of programs in each of up to three dimensions.
        """
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        tensors: tuple[Tensor, ...] = arguments[: self._tensor_count]
        key = (
            *[x.dtype for x in tensors],
            *[x.data_ptr() % ALIGNMENT for x in tensors],
            *[arguments[i] for i in self._key_numbers],
            *[arguments[i] > MAX_INT32 for i in self._other_numbers],
            *constants,
            *constants.values(),
        )
        if variant := self._variants.get(key):
            compiled, ordered_constants = variant
            three_dimensions = (*grid, 1, 1)[:3]
            compiled[three_dimensions](*arguments, *ordered_constants)
        elif compiled := self._kernel[grid](*arguments, **constants):
            names = self._kernel.arg_names[len(arguments) :]
            self._variants[key] = compiled, [constants[name] for name in names]


def launch_cheaply(kernel: Any) -> Any:
    """Decorate a function of `triton.jit` that the host launches. Under the interpreter it stays as it is."""
    return kernel if INTERPRETED else CachedKernel(kernel)
