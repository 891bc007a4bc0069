"""Device meshes, sharding specs, multi-process setup, and memory and time estimates."""

from jaxformer.layers.declarations import Declaration as Declaration
from jaxformer.layers.declarations import declarations as declarations
from jaxformer.layers.mode import axes_of as axes_of
from jaxformer.parallel.hosts import Hosts as Hosts
from jaxformer.parallel.hosts import first_decides as first_decides
from jaxformer.parallel.hosts import is_first as is_first
from jaxformer.parallel.hosts import join as join
from jaxformer.parallel.hosts import refuse_differences as refuse_differences
from jaxformer.parallel.mesh import MeshConfig as MeshConfig
from jaxformer.parallel.mesh import check_fits as check_fits
from jaxformer.parallel.mesh import make_mesh as make_mesh
from jaxformer.parallel.mesh import row_shares as row_shares
from jaxformer.parallel.mesh import token_axes as token_axes
from jaxformer.parallel.overlap import overlap_options as overlap_options
from jaxformer.parallel.placement import abstract_parameters as abstract_parameters
from jaxformer.parallel.placement import batch_spec as batch_spec
from jaxformer.parallel.placement import local_rows as local_rows
from jaxformer.parallel.placement import parameter_specs as parameter_specs
from jaxformer.parallel.placement import put as put
from jaxformer.parallel.placement import put_batch as put_batch
from jaxformer.parallel.placement import put_whole as put_whole
from jaxformer.parallel.placement import replicated as replicated
from jaxformer.parallel.placement import shardings as shardings
from jaxformer.parallel.placement import specs_like as specs_like
