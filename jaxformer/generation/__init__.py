"""From a prompt to new tokens."""

from jaxformer.generation.decode import generate as generate
from jaxformer.generation.samplers import Greedy as Greedy
from jaxformer.generation.samplers import Sample as Sample
from jaxformer.generation.samplers import Sampler as Sampler
