"""Text generation: prefill, decoding, samplers, beam search, and log-likelihoods."""

from jaxformer.generation.beam import Beams as Beams
from jaxformer.generation.beam import beam_search as beam_search
from jaxformer.generation.conversation import Conversation as Conversation
from jaxformer.generation.decode import generate as generate
from jaxformer.generation.decode import stream as stream
from jaxformer.generation.log_likelihood import LogLikelihood as LogLikelihood
from jaxformer.generation.log_likelihood import log_likelihoods as log_likelihoods
from jaxformer.generation.log_likelihood import rolling_windows as rolling_windows
from jaxformer.generation.samplers import Beam as Beam
from jaxformer.generation.samplers import Greedy as Greedy
from jaxformer.generation.samplers import Sample as Sample
from jaxformer.generation.samplers import Sampler as Sampler
from jaxformer.generation.samplers import sample_token as sample_token
from jaxformer.generation.speculation import MTP as MTP
from jaxformer.generation.speculation import DraftModel as DraftModel
from jaxformer.generation.speculation import Drafts as Drafts
from jaxformer.generation.speculation import Speculation as Speculation
from jaxformer.generation.speculation import speculate as speculate
from jaxformer.generation.steps import decode_step as decode_step
from jaxformer.generation.steps import prefill as prefill
from jaxformer.generation.unrolled import unroll as unroll
