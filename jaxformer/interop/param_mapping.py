"""Mapping between Hugging Face tensor names and our parameter paths, used in both directions.

A mapping has the rules of all models of a family. Rules for parameters that a model lacks (a bias,
an untied head) do not apply to it.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flax.traverse_util import unflatten_dict

from jaxformer import config as c
from jaxformer.interop.transforms import (
    FLAT,
    LINEAR,
    LINEAR_OF_HEADS,
    SAME,
    Rearrange,
    Scaled,
    Shape,
    Transform,
)
from jaxformer.layers.layouts import layout_of, segments_of

EMBEDDING_PATH = "embedding/tokens/embedding"
HEAD_PATH = "head/kernel"


@dataclass(frozen=True)
class MappingRule:
    """Rule that maps one Hugging Face tensor to one or more parameters.

    Attributes:
        hf_name: Name of the tensor, with "{layer}", "{next_layer}" and "{expert}" for the indices,
            and "{half_layer}" where two layers are one block there.
        params: Paths of the parameters, relative to the layer in rules of a stack.
        transform: Pattern of the axes, or another conversion of the values, or a function that
            gives it for a configuration.
        condition: Whether the rule applies to a model; None is all models with its parameters.
        kind: Attention kind of the layers that the rule applies to; None is all layers.
        last_hf_name: Name of the tensor of the last layer, if it is another.
        alternative: Whether only some files have the tensor. It then replaces the tensors of later
            rules for the same parameters; it is not written.
        may_lack: Whether a file may lack the tensor; its parameters are then zero.
        factors: Constant of each parameter, which multiplies what the tensor has; None has none.
    """

    hf_name: str
    params: str | tuple[str, ...]
    transform: str | Transform | Callable[[c.TransformerConfig], Transform] = SAME
    condition: Callable[[c.TransformerConfig], bool] | None = None
    kind: type | None = None
    last_hf_name: str | None = None
    alternative: bool = False
    may_lack: bool = False
    factors: tuple[float, ...] | None = None

    @property
    def param_paths(self) -> tuple[str, ...]:
        """Parameter paths as a tuple."""
        return (self.params,) if isinstance(self.params, str) else self.params

    def applies_to(self, config: c.TransformerConfig) -> bool:
        """Whether the rule applies to a configuration."""
        return self.condition is None or self.condition(config)

    def transform_for(self, config: c.TransformerConfig) -> Transform:
        """The transform of a configuration."""
        transform = self.transform
        if isinstance(transform, str):
            transform = Rearrange(transform)
        elif not isinstance(transform, Transform):
            transform = transform(config)
        return transform if self.factors is None else Scaled(part=transform, factors=self.factors)


@dataclass(frozen=True, kw_only=True)
class MultiTokenNames:
    """Names of the module of `TransformerConfig.multi_token_prediction` in a file.

    In all names "{layer}" is the number of layers of the model.

    Attributes:
        prefix: What all its tensors begin with.
        layer: What the tensors of its layer begin with, in place of "model.layers.{layer}".
        parts: Name of each of its other modules, by path.
        copies: Tensors that repeat the model's embedding or head, and which; they are not written.
        count: Field of config.json with the number of such modules.
        has_experts: Whether its layer has experts in any case.
    """

    prefix: str
    layer: str
    parts: Mapping[str, str]
    copies: Mapping[str, str]
    count: str
    has_experts: bool = False

    def tensor(self, module: str, num_layers: int) -> str:
        """Name of the weight of one of `parts`."""
        return f"{self.parts[module]}.weight".replace("{layer}", str(num_layers))

    def copies_at(self, num_layers: int) -> dict[str, str]:
        """`copies` of a model with so many layers."""
        return {x.replace("{layer}", str(num_layers)): path for x, path in self.copies.items()}

    def layer_rules(self, layer: Iterable["MappingRule"]) -> list["MappingRule"]:
        """The rules of its layer, from the rules of another layer."""
        new = (row.hf_name.replace("model.layers.{layer}", self.layer) for row in layer)
        return [replace(row, hf_name=name) for row, name in zip(layer, new, strict=True)]

    def part_rules(self) -> Iterator["MappingRule"]:
        """The rules of its other modules, whose paths are relative to it."""
        for path, name in self.parts.items():
            yield from (*norm_rules(name, path), *linear_rules(name, path))


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """All mapping rules of a family.

    Attributes:
        top_level: Rules outside the layers; `params` are full paths.
        stacks: Rules of a layer, by stack ("decoder", "encoder").
        multi_token: Names of the module of multi-token prediction, if the family has one.
    """

    top_level: tuple[MappingRule, ...]
    stacks: Mapping[str, tuple[MappingRule, ...]]
    multi_token: MultiTokenNames | None = None

    def with_factors(self, factors: Mapping[str, tuple[float, ...]]) -> "ParamMapping":
        """The mapping with these factors of the rules of layers, by name of the tensor."""
        stacks = {
            name: tuple(replace(rule, factors=factors.get(rule.hf_name)) for rule in rules)
            for name, rules in self.stacks.items()
        }
        return replace(self, stacks=stacks)

    def hf_name_of(self, path: str) -> str | None:
        """Hugging Face name of a top-level parameter, or None."""
        return next((row.hf_name for row in self.top_level if row.param_paths == (path,)), None)


def decoder_mapping(
    *rules: MappingRule, multi_token: MultiTokenNames | None = None
) -> ParamMapping:
    """The mapping of a decoder; names with "{layer}" and the like belong to layers."""
    layer = tuple(rule for rule in rules if "layer}" in rule.hf_name)
    top_level = tuple(rule for rule in rules if "layer}" not in rule.hf_name)
    return ParamMapping(top_level=top_level, stacks={"decoder": layer}, multi_token=multi_token)


class ParamSlice(NamedTuple):
    """A parameter path and the leading index of the slice."""

    path: str
    indices: tuple[int, ...]


class TensorMapping(NamedTuple):
    """One Hugging Face tensor, the parameter slices it fills, and the transform.

    A file may lack the tensor if `may_lack`.
    """

    hf_name: str
    hf_shape: Shape
    slices: tuple[ParamSlice, ...]
    slice_shapes: tuple[Shape, ...]
    transform: Transform
    may_lack: bool = False


def expand_mapping(
    mapping: ParamMapping,
    config: c.TransformerConfig,
    param_shapes: Mapping[str, Shape],
    *,
    stored: Container[str] = (),
) -> list[TensorMapping]:
    """Expand the rules for all layers and experts of one model.

    Args:
        mapping: Mapping of the family.
        config: The model.
        param_shapes: Shape of each parameter, by path.
        stored: Names of the tensors that the file has, which decide on alternatives.

    Returns:
        One mapping per Hugging Face tensor.
    """
    tensor_mappings: list[TensorMapping] = []
    layout = layout_of(unflatten_dict(param_shapes, sep="/"))
    for row in (row for row in mapping.top_level if row.applies_to(config)):
        transform = row.transform_for(config)
        tensor_mappings += _expand(row, transform, row.hf_name, "", (), param_shapes)
    for stack, layers in config.stacks.items():
        rows = [row for row in mapping.stacks.get(stack, ()) if row.applies_to(config)]
        segments = segments_of(config, stack, layout)
        for layer, options in enumerate(layers):
            section, index = segments.locate(layer)
            place = layer, layer == len(layers) - 1, f"{stack}/{section}/", index
            tensor_mappings += _expand_layer(rows, config, options, *place, param_shapes, stored)
    if config.multi_token_prediction and mapping.multi_token is not None:
        ahead, module = config.multi_token_model, "multi_token_prediction/"
        rows = mapping.multi_token.layer_rules(mapping.stacks["decoder"])
        section, index = ahead.segments("decoder").locate(0)
        for rules, prefix, at in (
            ([row for row in rows if row.applies_to(ahead)], f"{module}decoder/{section}/", index),
            (mapping.multi_token.part_rules(), module, ()),
        ):
            place = config.num_layers, False, prefix, at
            tensor_mappings += _expand_layer(
                rules, ahead, ahead.layers[0], *place, param_shapes, stored
            )
    return tensor_mappings


def _expand_layer(
    rows: Iterable[MappingRule],
    config: c.TransformerConfig,
    options: c.Layer,
    layer: int,
    is_last: bool,
    prefix: str,
    index: tuple[int, ...],
    param_shapes: Mapping[str, Shape],
    stored: Container[str],
) -> Iterator[TensorMapping]:
    """Expand the rules of a layer, whose paths begin with `prefix`."""
    replaced: set[str] = set()  # parameters
    for row in rows:
        if row.kind is not None and not isinstance(options.attention, row.kind):
            continue
        name = row.last_hf_name if is_last and row.last_hf_name is not None else row.hf_name
        numbers = {"layer": layer, "next_layer": layer + 1, "half_layer": layer // 2}
        for word, number in numbers.items():
            name = name.replace(f"{{{word}}}", str(number))
        if replaced.intersection(row.param_paths) or (row.alternative and name not in stored):
            continue
        replaced.update(row.param_paths if row.alternative else ())
        yield from _expand(row, row.transform_for(config), name, prefix, index, param_shapes)


def unmapped_params(
    tensor_mappings: list[TensorMapping], param_shapes: Mapping[str, Shape]
) -> list[str]:
    """Paths of parameters that have no tensor."""
    covered = {slot.path for link in tensor_mappings for slot in link.slices}
    return sorted(set(param_shapes) - covered)


def linear_rules(hf_name: str, param: str, *, input_axes: int = 1) -> tuple[MappingRule, ...]:
    """Mapping rules of a torch Linear: weight, and bias if it has one."""
    kernel = LINEAR if input_axes == 1 else LINEAR_OF_HEADS
    return (
        MappingRule(f"{hf_name}.weight", f"{param}/kernel", kernel),
        MappingRule(f"{hf_name}.bias", f"{param}/bias", FLAT),
    )


def branch_rules(prefix: str, branch: str, **names: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the linear layers of a branch.

    Args:
        prefix: Name of the branch.
        branch: Its path, such as "attention".
        **names: Name of each layer by its path in the branch; "out" joins the heads.
    """
    return tuple(
        rule
        for ours, name in names.items()
        for rule in linear_rules(
            f"{prefix}.{name}", f"{branch}/{ours}", input_axes=2 if ours == "out" else 1
        )
    )


def attention_rules(
    prefix: str, branch: str = "attention", *, out: str = "o_proj"
) -> tuple[MappingRule, ...]:
    """Mapping rules of an attention branch whose layers have the usual names."""
    return branch_rules(prefix, branch, query="q_proj", key="k_proj", value="v_proj", out=out)


def glu_rules(prefix: str, branch: str = "feed_forward") -> tuple[MappingRule, ...]:
    """Mapping rules of a gated network whose layers have the usual names."""
    return branch_rules(prefix, branch, gate="gate_proj", up="up_proj", down="down_proj")


def fused_rules(
    hf_name: str,
    branch: str,
    names: Iterable[str],
    kernels: str | Transform = LINEAR,
    biases: str | Transform = FLAT,
) -> tuple[MappingRule, ...]:
    """Mapping rules of linear layers of a branch whose weights are one tensor, as their biases."""
    return tuple(
        MappingRule(f"{hf_name}.{end}", tuple(f"{branch}/{name}/{leaf}" for name in names), how)
        for end, leaf, how in (("weight", "kernel", kernels), ("bias", "bias", biases))
    )


def norm_rules(hf_name: str, param: str) -> tuple[MappingRule, ...]:
    """Mapping rules of a norm: weight, and bias if it has one."""
    return MappingRule(f"{hf_name}.weight", f"{param}/scale"), MappingRule(
        f"{hf_name}.bias", f"{param}/bias"
    )


def layer_norm_rules(prefix: str, **names: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the norms of a layer: the name of each by its path."""
    return tuple(
        rule for ours, name in names.items() for rule in norm_rules(f"{prefix}.{name}", ours)
    )


def qk_norm_rules(
    prefix: str, query: str = "q_norm", key: str = "k_norm"
) -> tuple[MappingRule, ...]:
    """Mapping rules of the norms of queries and keys."""
    return layer_norm_rules(prefix, **{"attention/query_norm": query, "attention/key_norm": key})


def top_level_rules(
    embedding: str, norm: str | None = None, head: str = "lm_head"
) -> tuple[MappingRule, ...]:
    """Mapping rules of the token embedding, the final norm if there is one, and the head."""
    return (
        MappingRule(f"{embedding}.weight", EMBEDDING_PATH),
        *(() if norm is None else norm_rules(norm, "decoder/final_norm")),
        MappingRule(f"{head}.weight", HEAD_PATH, LINEAR),
        MappingRule(f"{head}.bias", "head/bias"),
    )


def _expand(
    row: MappingRule,
    transform: Transform,
    name: str,
    prefix: str,
    index: tuple[int, ...],
    param_shapes: Mapping[str, Shape],
) -> Iterator[TensorMapping]:
    paths = [prefix + path for path in row.param_paths]
    if not all(path in param_shapes for path in paths):
        return
    expert = "{expert}" in name
    for i in range(param_shapes[paths[0]][len(index)] if expert else 1):
        slice_index = (*index, i) if expert else index
        shapes = tuple(param_shapes[path][len(slice_index) :] for path in paths)
        yield TensorMapping(
            hf_name=name.replace("{expert}", str(i)),
            hf_shape=transform.hf_shape(shapes),
            slices=tuple(ParamSlice(path, slice_index) for path in paths),
            slice_shapes=shapes,
            transform=transform,
            may_lack=row.may_lack,
        )
