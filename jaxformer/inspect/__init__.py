"""Inspect a model: attention maps, residual stream, logit lens, statistics, plots.

Most functions take a configuration, parameters and tokens: parameters of `model.init`, of a
training run (`jaxformer.run.load_run`), or of `load_pretrained`. They run one forward
pass of `Transformer`.
"""

from jaxformer.inspect.attention_weights import AttentionMaps as AttentionMaps
from jaxformer.inspect.attention_weights import attention_entropy as attention_entropy
from jaxformer.inspect.attention_weights import attention_maps as attention_maps
from jaxformer.inspect.causal_effects import ablate_heads as ablate_heads
from jaxformer.inspect.causal_effects import activation_patching as activation_patching
from jaxformer.inspect.causal_effects import logit_difference as logit_difference
from jaxformer.inspect.causal_effects import path_patching as path_patching
from jaxformer.inspect.composition import CompositionScores as CompositionScores
from jaxformer.inspect.composition import composition_scores as composition_scores
from jaxformer.inspect.lens import TunedLens as TunedLens
from jaxformer.inspect.lens import logit_lens as logit_lens
from jaxformer.inspect.lens import token_losses as token_losses
from jaxformer.inspect.lens import train_tuned_lens as train_tuned_lens
from jaxformer.inspect.logit_attribution import LogitAttribution as LogitAttribution
from jaxformer.inspect.logit_attribution import logit_attribution as logit_attribution
from jaxformer.inspect.memory import StateMemory as StateMemory
from jaxformer.inspect.memory import state_memory as state_memory
from jaxformer.inspect.model_trace import ModelTrace as ModelTrace
from jaxformer.inspect.model_trace import ResidualTrace as ResidualTrace
from jaxformer.inspect.model_trace import trace as trace
from jaxformer.inspect.named_values import ModelRun as ModelRun
from jaxformer.inspect.named_values import ValueName as ValueName
from jaxformer.inspect.named_values import names as names
from jaxformer.inspect.patched_run import run as run
from jaxformer.inspect.patches import Add as Add
from jaxformer.inspect.patches import At as At
from jaxformer.inspect.patches import Mean as Mean
from jaxformer.inspect.patches import Replace as Replace
from jaxformer.inspect.patches import Zero as Zero
from jaxformer.inspect.plots import plot_attention as plot_attention
from jaxformer.inspect.plots import plot_heatmap as plot_heatmap
from jaxformer.inspect.plots import plot_lens as plot_lens
from jaxformer.inspect.plots import plot_lines as plot_lines
from jaxformer.inspect.plots import show_losses as show_losses
from jaxformer.inspect.plots import show_tree as show_tree
from jaxformer.inspect.positions import position_bias as position_bias
from jaxformer.inspect.positions import position_embeddings as position_embeddings
from jaxformer.inspect.positions import rotation_angles as rotation_angles
from jaxformer.inspect.positions import score_by_distance as score_by_distance
from jaxformer.inspect.sizes import ParameterRow as ParameterRow
from jaxformer.inspect.sizes import cache_sizes as cache_sizes
from jaxformer.inspect.sizes import format_parameters as format_parameters
from jaxformer.inspect.sizes import parameter_table as parameter_table
from jaxformer.inspect.statistics import Statistics as Statistics
from jaxformer.inspect.statistics import activation_statistics as activation_statistics
from jaxformer.inspect.statistics import gradient_statistics as gradient_statistics
from jaxformer.inspect.statistics import residual_contributions as residual_contributions
from jaxformer.layers.layouts import unstack_layers as unstack_layers
