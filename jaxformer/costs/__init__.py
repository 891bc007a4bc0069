"""Cost model: parameter counts from layer declarations; FLOPs and bytes by formula.

Nothing is built or compiled, so a model of any size can be planned on paper. A multiply and an add
count as two FLOPs; norms, activations and softmax, a percent or so, are left out.
"""

from jaxformer.costs.logits import head_flops as head_flops
from jaxformer.costs.logits import logit_bytes as logit_bytes
from jaxformer.costs.logits import recomputes_logits as recomputes_logits
from jaxformer.costs.model import REMAT as REMAT
from jaxformer.costs.model import TRAINING_FACTOR as TRAINING_FACTOR
from jaxformer.costs.model import activation_bytes as activation_bytes
from jaxformer.costs.model import active_parameters as active_parameters
from jaxformer.costs.model import cache_bytes as cache_bytes
from jaxformer.costs.model import expert_flops as expert_flops
from jaxformer.costs.model import forward_flops as forward_flops
from jaxformer.costs.model import parameters as parameters
from jaxformer.costs.model import training_flops_per_token as training_flops_per_token
