"""Cost model: parameter counts from layer declarations; FLOPs and bytes by formula.

Nothing is initialised or compiled, so models of any size are fast. A multiply-add counts as two
FLOPs; norms, activations and softmax, about one percent, are not counted.
"""

from jaxformer.costs.logits import logit_bytes as logit_bytes
from jaxformer.costs.logits import logit_flops as logit_flops
from jaxformer.costs.logits import recomputes_logits as recomputes_logits
from jaxformer.costs.model import REMAT_POLICIES as REMAT_POLICIES
from jaxformer.costs.model import activation_bytes as activation_bytes
from jaxformer.costs.model import cache_bytes as cache_bytes
from jaxformer.costs.model import expert_flops as expert_flops
from jaxformer.costs.model import forward_flops as forward_flops
from jaxformer.costs.model import num_active_parameters as num_active_parameters
from jaxformer.costs.model import num_parameters as num_parameters
from jaxformer.costs.model import training_factor as training_factor
from jaxformer.costs.model import training_flops_per_token as training_flops_per_token
