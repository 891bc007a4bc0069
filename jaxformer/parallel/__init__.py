"""Device meshes, sharding specs, multi-process setup, and memory and time estimates."""

from jaxformer.layers.lora import join_parameters as join_parameters
from jaxformer.layers.lora import split_parameters as split_parameters
from jaxformer.layers.parameter_metadata import ParameterMetadata as ParameterMetadata
from jaxformer.layers.parameter_metadata import parameter_metadata as parameter_metadata
from jaxformer.layers.runtime import active_mesh_axes as active_mesh_axes
from jaxformer.parallel.distributed import DistributedConfig as DistributedConfig
from jaxformer.parallel.distributed import broadcast_from_process_0 as broadcast_from_process_0
from jaxformer.parallel.distributed import (
    check_equal_across_processes as check_equal_across_processes,
)
from jaxformer.parallel.distributed import initialize_distributed as initialize_distributed
from jaxformer.parallel.distributed import is_primary_process as is_primary_process
from jaxformer.parallel.mesh import MeshConfig as MeshConfig
from jaxformer.parallel.mesh import check_divisible as check_divisible
from jaxformer.parallel.mesh import make_mesh as make_mesh
from jaxformer.parallel.mesh import num_batch_shards as num_batch_shards
from jaxformer.parallel.mesh import token_axes as token_axes
from jaxformer.parallel.overlap import overlap_compiler_options as overlap_compiler_options
from jaxformer.parallel.sharding import abstract_parameters as abstract_parameters
from jaxformer.parallel.sharding import batch_spec as batch_spec
from jaxformer.parallel.sharding import local_batch_slice as local_batch_slice
from jaxformer.parallel.sharding import parameter_shardings as parameter_shardings
from jaxformer.parallel.sharding import parameter_specs as parameter_specs
from jaxformer.parallel.sharding import put_batch as put_batch
from jaxformer.parallel.sharding import put_replicated as put_replicated
from jaxformer.parallel.sharding import put_sharded as put_sharded
from jaxformer.parallel.sharding import replicated as replicated
from jaxformer.parallel.sharding import shardings as shardings
from jaxformer.parallel.sharding import state_specs as state_specs
