"""References without a supported family, by fixture name."""

from tests.interop.mapped_absolute import gpt3_banded, gpt_neo, transformer_2017
from tests.interop.mapped_relative import gopher, lamda_like, xlnet

MAPPED = {
    "ref_transformer2017": transformer_2017,
    "gpt3_banded": gpt3_banded,
    "gpt_neo": gpt_neo,
    "lamda_like": lamda_like,
    "ref_gopher": gopher,
    "xlnet_uni": xlnet,
}
