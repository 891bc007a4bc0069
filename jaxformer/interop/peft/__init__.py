"""Read and write adapters as PEFT does: adapter_config.json and adapter_model.safetensors."""

from jaxformer.interop.peft.modules import ADAPTER_CONFIG as ADAPTER_CONFIG
from jaxformer.interop.peft.reading import load_adapter as load_adapter
from jaxformer.interop.peft.writing import save_adapter as save_adapter
from jaxformer.interop.peft.writing import write_adapter as write_adapter
