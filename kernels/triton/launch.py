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
    """A Triton kernel that can be launched with little work on the host.

    Triton compiles variants of a kernel for dtypes, alignments and values of its arguments. To find a variant, Triton's
    launch binds and classifies every argument, which takes 20 us. Here a dictionary with a short key finds it. The
    parameters of a kernel must be tensors, with names that end in `_ptr`, then numbers, then constants.
    """

    def __init__(self, kernel: Any) -> None:
        """Wrap a function that `triton.jit` has returned."""
        self._kernel = kernel
        self._tensor_count = sum(name.endswith("_ptr") for name in kernel.arg_names)
        numbers = [p for p in kernel.params[self._tensor_count :] if not p.is_constexpr]
        self._specialized_positions = [p.num for p in numbers if not p.do_not_specialize]
        """Positions of the numbers for whose values Triton may compile other code."""
        self._sized_positions = [p.num for p in numbers if p.do_not_specialize]
        """Positions of the numbers for which Triton compiles other code only if they need 64 bits."""
        self._variants: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        """Key of a launch -> (compiled kernel, its constants in the order of the parameters)."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel: tensors and numbers by position, constants and options by name.

        `grid`: number of programs in each of up to three dimensions.
        """
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch the variant for the arguments. If there is none yet, Triton compiles and launches it."""
        tensors: tuple[Tensor, ...] = arguments[: self._tensor_count]
        key = (
            *[x.dtype for x in tensors],
            *[x.data_ptr() % ALIGNMENT for x in tensors],
            *[arguments[i] for i in self._specialized_positions],
            *[arguments[i] > MAX_INT32 for i in self._sized_positions],
            *constants,
            *constants.values(),
        )
        variant = self._variants.get(key)
        if variant is not None:
            compiled, ordered_constants = variant
            grid_of_three = (*grid, 1, 1)[:3]
            compiled[grid_of_three](*arguments, *ordered_constants)
            return
        compiled = self._kernel[grid](*arguments, **constants)
        if compiled is not None:
            constant_names = self._kernel.arg_names[len(arguments) :]
            self._variants[key] = compiled, [constants[name] for name in constant_names]


def launch_cheaply(kernel: Any) -> Any:
    """Decorate a function of `triton.jit` that the host launches. Under the interpreter it stays as it is."""
    return kernel if INTERPRETED else CachedKernel(kernel)
