"""What a pass is: a small immutable value whose fields are its options and whose `run` edits through a `Rewriter`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from torch import fx

from fxbackend.errors import PipelineError
from fxbackend.matcher import Match, Miss, candidates
from fxbackend.pattern import Expression
from fxbackend.printer import type_text
from fxbackend.program import Stage, module_of, shape_of, value_of
from fxbackend.rewriter import Rewriter

_WAYS = 16  # in how many ways a pattern is tried at one node, until its check accepts one


@dataclass(frozen=True)
class Pass(ABC):
    """A step of a pipeline. Subclasses are frozen dataclasses.

    Attributes:
        name: the file stem, the name in reports and in dump folders.
        stage: the stage whose program the pass works on (and helps to reach).
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]

    @abstractmethod
    def run(self, rw: Rewriter) -> None:
        """Rewrites the program; every edit goes through `rw`."""

    def __str__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        return f"{self.name}({options})" if options else self.name


class Refuse(Exception):
    """Raised by `check` or `rewrite` of a pattern pass: leave this place as it is, for the reason given."""


@dataclass(frozen=True)
class PatternPass(Pass):
    """A pass that is a pattern, a check and a rewrite, tried at every node of the graph."""

    @abstractmethod
    def patterns(self) -> Mapping[str, Expression]:
        """The variants by name; the first that matches at a node wins."""

    def check(self, match: Match) -> None:
        """Raises `Refuse` with a sentence when a match must be left alone. Derived values go to `match.facts`."""

    @abstractmethod
    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node | Mapping[fx.Node, fx.Node]:
        """Builds the replacement; returns the new root, or a node for each matched node to be replaced."""

    def run(self, rw: Rewriter) -> None:
        """Matches, checks and rewrites every place once, from the output up, so that the larger match comes first."""
        patterns = self.patterns()
        misses: list[Miss] = []
        for node in reversed(list(rw.graph.nodes)):
            if node._erased:
                continue
            refused = ""
            for found in islice(candidates(patterns, node), _WAYS):
                if isinstance(found, Miss):
                    misses += [] if refused else [found]
                    break
                try:
                    self._apply(rw, found)
                except Refuse as refusal:
                    refused = refused or str(refusal)
                    continue
                refused = ""
                break
            if refused:
                rw.refuse(node, refused)
        for miss in sorted(misses, key=lambda each: -each.depth):
            rw.near_miss(miss.node, miss.reason)

    def _apply(self, rw: Rewriter, found: Match) -> None:
        self.check(found)
        with rw.at(found.point, origin=found.root):
            result = self.rewrite(rw, found)
        found.assert_all_used(self.name)
        replacements = {found.root: result} if isinstance(result, fx.Node) else result
        for old, new in replacements.items():
            if shape_of(old) != shape_of(new) or value_of(old).dtype != value_of(new).dtype:
                raise PipelineError(
                    f"{self.name} replaces {old.name} {type_text(value_of(old))} ({module_of(old)}) by "
                    f"{type_text(value_of(new))}."
                )
        rw.replace(replacements)
        rw.matched()
