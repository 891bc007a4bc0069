"""Text generation: prefill, decoding, samplers, beam search, and log-likelihoods."""

from jaxformer.generation.beam import Beams as Beams
from jaxformer.generation.beam import beam_search as beam_search
from jaxformer.generation.decode import generate as generate
from jaxformer.generation.decode import stream as stream
from jaxformer.generation.likelihood import Likelihood as Likelihood
from jaxformer.generation.likelihood import likelihoods as likelihoods
from jaxformer.generation.likelihood import windows as windows
from jaxformer.generation.samplers import Beam as Beam
from jaxformer.generation.samplers import Greedy as Greedy
from jaxformer.generation.samplers import Sample as Sample
from jaxformer.generation.samplers import Sampler as Sampler
from jaxformer.generation.samplers import choose as choose
from jaxformer.generation.steps import decode_step as decode_step
from jaxformer.generation.steps import prefill as prefill
from jaxformer.generation.unrolled import unroll as unroll
