"""Read and write Hugging Face model folders (config.json and safetensors).

    config, params = load_pretrained(folder)
    save_pretrained(other_folder, config, params)
    config, params = load_adapter(peft_folder, config, params)

`jaxformer.data.load_tokenizer` reads the tokenizer of the folder (``tokenizer.json``).
"""

from jaxformer.interop.hub import fetch_folder as fetch_folder
from jaxformer.interop.load import Pretrained as Pretrained
from jaxformer.interop.load import load_config as load_config
from jaxformer.interop.load import load_pretrained as load_pretrained
from jaxformer.interop.peft import load_adapter as load_adapter
from jaxformer.interop.peft import save_adapter as save_adapter
from jaxformer.interop.save import save_pretrained as save_pretrained
