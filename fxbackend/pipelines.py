"""The default pipeline: a literal list, each line with the reason for its place."""

from __future__ import annotations

from fxbackend.passes.attention import Attention
from fxbackend.passes.canonicalize import Canonicalize
from fxbackend.passes.canonicalize_views import CanonicalizeViews
from fxbackend.passes.cut_pipeline import CutPipeline
from fxbackend.passes.decompose import Decompose
from fxbackend.passes.drop_batch_axis import DropBatchAxis
from fxbackend.passes.experts import Experts
from fxbackend.passes.fill_buffers import FillBuffers
from fxbackend.passes.functionalize import Functionalize
from fxbackend.passes.fuse_add_rms_norm import FuseAddRmsNorm
from fxbackend.passes.fuse_glu import FuseGlu
from fxbackend.passes.fuse_qkv import FuseQkv
from fxbackend.passes.fuse_rope import FuseRope
from fxbackend.passes.linear import Linear
from fxbackend.passes.position_tables import PositionTables
from fxbackend.passes.positions import Positions
from fxbackend.passes.raise_attention import RaiseAttention
from fxbackend.passes.rms_norm import RmsNorm
from fxbackend.passes.rope import Rope
from fxbackend.passes.shard_tensor_parallel import ShardTensorParallel
from fxbackend.passes.simplify_views import SimplifyViews
from fxbackend.passes.vocabulary import Vocabulary
from fxbackend.pipeline import Pipeline


def default_pipeline() -> Pipeline:
    """What every target starts from: capture to the fused program."""
    return Pipeline(
        (
            FillBuffers(),  # before functionalize: writes to parts of a fresh buffer are its way to concatenate
            Functionalize(),  # early: whatever looks at a value must see the one that its readers saw
            Decompose(),  # before canonicalize: it simplifies the factors of one that this leaves
            Canonicalize(),  # before all patterns: they know one spelling only
            CanonicalizeViews(),  # after canonicalize: it has made the dimensions positive and the no-op casts go
            DropBatchAxis(),  # after canonicalize: its rules expect positive dimensions and one kind of view
            RaiseAttention(),  # before positions: a mask made of arange goes, what counts then is a position
            Positions(),  # before the tables: they are made of positions
            PositionTables(),  # before rope: rope reads cos and sin off evaluated tables
            Rope(),  # before attention: it removes the transposes that attention puts around its operands
            Attention(),  # the interface call becomes the op; its transposes meet those of rope and of the views
            Experts(),  # any place after canonicalize; the router before it stays as it is
            Linear(),  # before vocabulary: the head is looked for among the dialect's linears
            RmsNorm(),  # any place after canonicalize
            Vocabulary(),  # last to raise: the head is what is left behind the output
            SimplifyViews(),  # after all that add transposes: fusions look through as few views as possible
            FuseQkv(),  # before rope fusion: it walks from the attention through single ropes
            FuseGlu(),  # after linear
            FuseAddRmsNorm(),  # after rms_norm; the other addend may come from any block
            FuseRope(),  # last: q and k become results of one op
        )
    )


def parallel_pipeline(world: int, rank: int, layers: tuple[int, ...]) -> Pipeline:
    """From the fused program to that of one rank.

    Args:
        world: number of tensor-parallel ranks.
        rank: one of them.
        layers: how many attentions each pipeline stage holds.
    """
    return Pipeline(
        (
            ShardTensorParallel(world, rank),  # before the cuts: a reduction stands before the place of a cut
            CutPipeline(layers),
        )
    )
