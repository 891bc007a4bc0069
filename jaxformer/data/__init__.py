"""Text to tokens to batches; every batch a pure function of (seed, step)."""

from jaxformer.data.batches import Batch as Batch
from jaxformer.data.batches import Batches as Batches
from jaxformer.data.batches import evaluation_batches as evaluation_batches
from jaxformer.data.corpus import Corpus as Corpus
from jaxformer.data.corpus import Document as Document
from jaxformer.data.corpus import Split as Split
from jaxformer.data.corpus import StandardLibrary as StandardLibrary
from jaxformer.data.corpus import TextFiles as TextFiles
from jaxformer.data.corpus import documents as documents
from jaxformer.data.corpus import gzip_bits_per_byte as gzip_bits_per_byte
from jaxformer.data.corpus import split as split
from jaxformer.data.packing import open_packed as open_packed
from jaxformer.data.packing import pack as pack
from jaxformer.data.rows import PackedRows as PackedRows
from jaxformer.data.rows import Row as Row
from jaxformer.data.saved_tokenizers import load_tokenizer as load_tokenizer
from jaxformer.data.saved_tokenizers import tokenizer_from_json as tokenizer_from_json
from jaxformer.data.tokenizers import BPE as BPE
from jaxformer.data.tokenizers import BPETokenizer as BPETokenizer
from jaxformer.data.tokenizers import ByteLevel as ByteLevel
from jaxformer.data.tokenizers import ByteTokenizer as ByteTokenizer
from jaxformer.data.tokenizers import Tokenizer as Tokenizer
from jaxformer.data.tokenizers import TokenizerConfig as TokenizerConfig
from jaxformer.data.tokenizers import build_tokenizer as build_tokenizer
from jaxformer.data.tokenizers import train_bpe as train_bpe
