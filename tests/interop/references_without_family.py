"""References without a supported family, by fixture name."""

from tests.interop.references_absolute_positions import gpt3_banded, transformer_2017
from tests.interop.references_relative_positions import gopher, lamda_like, xlnet

REFERENCES_WITHOUT_FAMILY = {
    "ref_transformer2017": transformer_2017,
    "gpt3_banded": gpt3_banded,
    "lamda_like": lamda_like,
    "ref_gopher": gopher,
    "xlnet_uni": xlnet,
}
