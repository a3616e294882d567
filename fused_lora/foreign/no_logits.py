"""The output of a model with a fused loss. Computing with its logits raises an error that says why
there are none.

There `outputs.logits` is `NO_LOGITS`, not None. If you index it, cast it, add to it, pass it to a
torch function or ask for its shape, it raises an error that names cross_entropy.

Code that walks over an output finds no logits, as if they were None: `to_tuple`, indices, `items`,
`in`, pytrees and pickles. accelerate walks over outputs to cast and to gather them, and refuses any
object that is not a tensor. (Unsloth's placeholder is an item of its output, and users met that
refusal in `pad_across_processes`.) accelerate also makes a new output of the same class when
bf16=True casts one. So the attribute belongs to a subclass of the output's class: on an instance it
would be lost.

`outputs.logits is None` does not survive: no value passes this test and still raises in later use.
We read transformers 5.17, accelerate 1.15, PEFT 0.21 and TRL 1.15, and none of them tests for it in
training. `"logits" in outputs` is the test that works, fused or not.
"""

from functools import cache
from typing import Any, NoReturn

MESSAGE = (
    "outputs.logits: the fused loss computes no logits in training: leave cross_entropy out of "
    "Fusion, or evaluate in eval mode and torch.no_grad()"
)


class NoLogits:
    """A placeholder for logits. It can be compared, printed, copied and pickled."""

    def __getattr__(self, _: str) -> NoReturn:
        raise AttributeError(MESSAGE)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise TypeError(MESSAGE)

    def __repr__(self) -> str:
        return f"<{MESSAGE}>"

    def __reduce__(self) -> str:
        return "NO_LOGITS"


def _refuse(*_: Any) -> NoReturn:
    raise TypeError(MESSAGE)


# Python looks for these on the class.
for _name in (
    "getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "index", "array",
    "neg", "abs", "invert", "lt", "le", "gt", "ge",
    *(side + name for side in ("", "r", "i") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    )),
):  # fmt: skip
    setattr(NoLogits, f"__{_name}__", _refuse)

NO_LOGITS = NoLogits()


@cache
def without_logits(output_class: Any) -> Any:
    """Return a subclass of an output class that has NO_LOGITS instead of None as logits."""

    class WithoutLogits(output_class):
        @property
        def logits(self) -> Any:
            logits = vars(self).get("logits")
            return NO_LOGITS if logits is None else logits

        @logits.setter
        def logits(self, value: Any) -> None:
            self.__dict__["logits"] = value

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, None if value is NO_LOGITS else value)

        def __getitem__(self, key: Any) -> Any:
            if key == "logits" and key not in self:
                raise KeyError(MESSAGE)
            return super().__getitem__(key)

        def __reduce__(self) -> Any:  # pickle cannot find a class made here
            return output_class(**self).__reduce__()

    WithoutLogits.__name__ = WithoutLogits.__qualname__ = output_class.__name__
    return WithoutLogits
