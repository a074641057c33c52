"""What tests of passes are written with: small programs, a golden text, and one harness that asks all the questions.

model = Wrapped(MyBlock(), width=8)
program = before(default_pipeline(), "rms_norm", program_of(model))
check_pass(program, RmsNorm(), model.state_dict(), matches=1, golden=...)
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module

from fxbackend.observers import VerifyEachPass
from fxbackend.pass_base import Pass
from fxbackend.pipeline import Pipeline
from fxbackend.printer import program_text
from fxbackend.program import Facts, Program, Stage, example_tokens, new_fake_mode, token_input
from fxbackend.weights import Piece, Slot, WeightPlan

VOCABULARY = 11


class Wrapped(nn.Module):
    """A causal model around `body`: embedding, `body(hidden, positions)`, language-model head.

    The body sees what a layer of Transformers sees: hidden states `[1, tokens, width]` and positions `[1, tokens]`.
    """

    def __init__(self, body: nn.Module, width: int, out_width: int | None = None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.body = body
        self.head = nn.Linear(out_width or width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[1, tokens, VOCABULARY]`."""
        return self.head(self.body(self.embed(ids), positions))


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every parameter random values around 0.1, far from what initialisation leaves (zeros and ones)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.1)
    return module


def program_of(module: nn.Module, max_model_len: int = 32, dtype: torch.dtype = torch.float32) -> Program:
    """Captures `module(ids, positions)`, both `[1, tokens]`, by the same route as a model of Transformers."""
    from fxbackend.hf.capture import _module_paths, _name_inputs

    module = randomise(module.to(dtype).eval())
    real: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mode = new_fake_mode()
    ids = token_input(mode, "input_ids", (1, example_tokens(max_model_len)), "cpu")
    with mode:
        positions = torch.empty(ids.shape, dtype=torch.int64)
        fakes = [torch.empty(value.shape, dtype=value.dtype) for value in real.values()]
    paths = {each: path for path, each in module.named_modules()}

    def forward(ids: torch.Tensor, positions: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        with _reparametrize_module(module, dict(zip(real, values, strict=True)), tie_weights=True):
            return module(ids, positions)

    with _module_paths(paths), mode, torch.no_grad():
        traced = make_fx(forward, tracing_mode="real", pre_dispatch=True)(ids, positions, *fakes)
    plan = _plan(module)
    for node in traced.graph.find_nodes(op="get_attr"):  # tensors that the forward makes of Python numbers
        plan.add_constant(str(node.target), getattr(traced, str(node.target)).detach().clone())
    _name_inputs(traced.graph, list(real))
    facts = Facts(type(module).__name__, "test", dtype, max_model_len, VOCABULARY)
    return Program(traced.graph, plan, facts, Stage.CAPTURED, mode).copy()


def _plan(module: nn.Module) -> WeightPlan:
    plan = WeightPlan()
    for name, value in module.named_parameters():
        plan.add(Slot(name, tuple(value.shape), value.dtype, (Piece(name),), tuple(value.shape[:1])))
    for name, buffer in module.named_buffers():
        plan.add_constant(name, buffer.detach().clone())
        plan.ignored[name] = "a buffer"
    return plan


def run(program: Program, state: Mapping[str, torch.Tensor], length: int = 9, seed: int = 0) -> torch.Tensor:
    """The logits `[length, V]` of random tokens, with the weights of an original state dict."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, program.facts.vocab_size, (length,), generator=generator)
    inputs = {"input_ids": ids, "positions": torch.arange(length)}
    if program.inputs()["input_ids"].meta["val"].ndim == 2:
        inputs = {name: value.unsqueeze(0) for name, value in inputs.items()}
    return program.run(inputs, program.weights.materialise(state)).reshape(length, -1)


def golden_text(program: Program, modules: bool = False) -> str:
    """The printer's text with values numbered in order, so that it does not depend on the passes that ran before."""
    numbers: dict[str, str] = {}
    text = program_text(program, modules)
    return re.sub(r"fxv_\d+", lambda found: numbers.setdefault(found.group(), f"v{len(numbers)}"), text)


def check_pass(
    program: Program,
    pass_: Pass,
    state: Mapping[str, torch.Tensor],
    *,
    matches: int | None,
    golden: str | None = None,
    refusals: Sequence[str] = (),
    tolerance: float = 1e-5,
) -> Program:
    """Runs one pass and asks everything that every pass must answer.

    Asked: the count; the text afterwards; the same numbers before and after, with the weights of the original state
    dict; a second run that finds and changes nothing; one refusal per entry of `refusals`, with that reason.

    Args:
        program: where the pass starts.
        pass_: the pass.
        state: the state dict of the model that was captured.
        matches: how many places must be rewritten; None when the count says nothing.
        golden: the expected text, indented as it likes.
        refusals: parts of the expected reasons, in the order of the record.
        tolerance: absolute and relative, of the logits.

    Returns:
        The rewritten program.
    """
    before = run(program, state)
    after = Pipeline((pass_,)).run(program, [VerifyEachPass()], partial=True)
    record = after.history[-1]
    assert matches is None or record.matches == matches, f"{record.matches} matches, not {matches}:\n{explain(after)}"
    reasons = [refusal.reason for refusal in record.refusals]
    assert len(reasons) == len(refusals), f"refusals {reasons}"
    for reason, expected in zip(reasons, refusals, strict=True):
        assert expected in reason, f"refused with {reason!r}, not {expected!r}"
    if golden is not None:
        found, expected = golden_text(after).strip(), textwrap.dedent(golden).strip()
        assert found == expected, f"the program is\n\n{found}\n"
    torch.testing.assert_close(run(after, state), before, atol=tolerance, rtol=tolerance)
    again = Pipeline((pass_,)).run(after, [VerifyEachPass()], partial=True)
    assert again.history[-1].matches == 0 and not again.history[-1].changed, f"a second run:\n{explain(again)}"
    assert program_text(again) == program_text(after)
    assert str(again.weights) == str(after.weights)
    return after


def explain(program: Program) -> str:
    """The text of a program with the refusals and near misses of its last pass."""
    record = program.history[-1]
    lines = [golden_text(program)]
    lines += [f"refused: {refusal}" for refusal in record.refusals]
    lines += [f"near miss: {miss}" for miss in record.near_misses[:5]]
    return "\n".join(lines)


def before(pipeline: Pipeline, name: str, program: Program) -> Program:
    """`program` after the passes of `pipeline` in front of `name`, verified after each."""
    return pipeline.before(name).run(program, [VerifyEachPass()], partial=True)
