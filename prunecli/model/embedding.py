"""The token embeddings of a checkpoint: where tokens come in and go out, and which tensors that takes."""

from dataclasses import dataclass
from functools import cached_property

from prunecli.architectures import Architecture
from prunecli.errors import CheckpointError, UsageError
from prunecli.model.changes import EmbeddingChange, InputChange
from prunecli.model.declared import Sizes
from prunecli.model.define import UnitShape
from prunecli.model.structure import Structure


@dataclass(frozen=True)
class TokenTables:
    """Both sides of a model's token embeddings.

    Attributes:
        input: name of the input's module: "model.shared".
        aliases: names of the modules that are the same one.
        output: name of the output layer, which not every class of the family has.
        vocabulary: V.
        model_dim: m.
        unit: dimensions of the unit in the place of the input table; None: it is a table.
        change: how both differ from the stock ones.
    """

    input: str
    aliases: tuple[str, ...]
    output: str
    vocabulary: int
    model_dim: int
    unit: UnitShape | None
    change: EmbeddingChange

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Full name -> shape of every tensor that the stock model lacks or has in another shape."""
        unit = {} if self.unit is None else self.unit.tensors()
        shapes = {f"{self.input}.{name}": shape for name, shape in unit.items()}
        if (output := self.change.output) is not None:
            width = self.model_dim if output.map_dim is None else output.map_dim
            if output.map_dim is not None:
                shapes[f"{self.output}.project.weight"] = (width, self.model_dim)
            if not output.tied:
                shapes[f"{self.output}.weight"] = (self.vocabulary, width)
        return shapes


def resolve_tables(sizes: Sizes, structure: Structure) -> TokenTables | None:
    """Both sides of the token embeddings; None where the family does not declare any.

    Raises:
        CheckpointError: config.json lacks a size, or says of its embeddings what cannot be.
    """
    family = sizes.family
    change = structure.embedding
    if family.embedding is None:
        if change != EmbeddingChange():
            raise CheckpointError(
                f"config.json names factorised embeddings; those of type {family.model_type} are not declared"
            )
        return None
    table = f"{family.embedding.input}.weight"
    if family.found is not None:
        model_dim = family.found.skeleton.stored[table][1]
    else:
        model_dim = sizes.count(next(spec.shape[1] for spec in family.tensors if spec.name == table))
    vocabulary = sizes.count(family.vocabulary[0])
    output = f"{family.embedding.output}.weight"
    return TokenTables(
        input=family.embedding.input,
        aliases=tuple(
            alias.removesuffix(".weight")
            for alias, name in family.tied.items()
            if name == table and alias != output
        ),
        output=family.embedding.output,
        vocabulary=vocabulary,
        model_dim=model_dim,
        unit=None if change.unit is None else unit_shape(change.unit, vocabulary, model_dim),
        change=change,
    )


def can_untie(family: Architecture) -> bool:
    """Whether a config of the family can say that the output layer has a table of its own, and says nothing else so."""
    output = "" if family.embedding is None else family.embedding.output
    return bool(output) and family.found is not None and family.found.unties(f"{output}.weight")


def unit_shape(change: InputChange, vocabulary: int, model_dim: int) -> UnitShape:
    """The dimensions of a unit that config.json names.

    Raises:
        CheckpointError: they cannot be.
    """
    try:
        fields = {key: value for key, value in vars(change).items() if key not in ("cached", "zero_padding")}
        return UnitShape(vocabulary, model_dim=model_dim, **fields)
    except UsageError as error:
        raise CheckpointError(
            f"config.json names an embedding that cannot be: {error.message}", "Copy the file again."
        ) from error


def resolve_ties(sizes: Sizes, tables: TokenTables | None) -> dict[str, str]:
    """Alias -> stored name of the tensors that are one in a model with these embeddings."""
    ties = dict(sizes.ties())
    if tables is None or tables.change.is_stock:
        return ties
    table, output = f"{tables.input}.weight", f"{tables.output}.weight"
    if tables.unit is not None:
        ties = {alias: name for alias, name in ties.items() if name != table or alias == output}
        ties |= {
            f"{alias}.{name}": f"{tables.input}.{name}"
            for alias in tables.aliases
            for name in tables.unit.tensors()
        }
    ties.pop(output, None)
    if tables.change.output is not None and tables.change.output.tied:
        ties[output] = f"{tables.input}.map.weight"
    return ties


def describe_embeddings(tables: TokenTables | None) -> str:
    """One line on what is no table of the stock model's, or was one of a unit's; empty where nothing changed."""
    if tables is None or tables.change == EmbeddingChange():
        return ""
    parts = []
    if (unit := tables.change.input) is not None:
        stored = "a table of the rows of" if unit.cached else ""
        sizes = f"{unit.map_dim} to {tables.model_dim}"
        if unit.expand_dim:
            sizes = (
                f"{unit.map_dim} to {unit.expand_dim} to {tables.model_dim}, {unit.depth} layers, "
                f"up to {unit.max_groups} groups"
                + ", one block a layer" * unit.shared_blocks
                + ", no reduction" * (not unit.reduction)
            )
        parts.append(" ".join(f"input: {stored} a unit of kind {unit.kind} ({sizes})".split()))
    if (output := tables.change.output) is not None:
        if output.map_dim is None:
            parts.append("output: a table of its own")
        else:
            of = "the input's map table" if output.tied else "a map table of its own"
            parts.append(f"output: {tables.model_dim} to {output.map_dim}, then {of}")
    return "; ".join(parts)
