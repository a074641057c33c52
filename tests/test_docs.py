"""The code in the documentation runs."""

from __future__ import annotations

from pathlib import Path

import regex
import torch

from fxbackend.hf.tiny import tiny_model
from fxbackend.observers import VerifyEachPass
from tests.programs import captured

DOCS = Path(__file__).parent.parent / "docs"


def test_the_pass_of_the_tutorial_works() -> None:
    text = (DOCS / "writing-a-pass.md").read_text(encoding="utf-8")
    code = "\n\n".join(regex.findall(r"```python\n(.*?)```", text, regex.DOTALL))
    namespace: dict[str, object] = {"__name__": "tutorial"}
    exec(compile(code, "writing-a-pass.md", "exec", dont_inherit=True), namespace)
    program = namespace["passes"].run(captured(tiny_model("llama")), [VerifyEachPass()])  # type: ignore[attr-defined]
    record = next(each for each in program.history if each.name == "raise_silu")
    assert record.matches == 0  # Llama spells silu as one op already

    class Swish(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x)

    graph = torch.fx.experimental.proxy_tensor.make_fx(Swish())(torch.ones(3)).graph
    from fxbackend.matcher import match

    (root,) = [node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert match(namespace["RaiseSilu"]().patterns(), root).pattern == "swish"  # type: ignore[operator, union-attr]
