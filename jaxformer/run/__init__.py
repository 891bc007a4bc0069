"""Programs as functions: pretrain, finetune, dpo, evaluate, generate, export (extra `train`).

    from jaxformer import data, run

    folder = run.finetune(run.Finetune(init="path/to/folder", corpus=data.TextFiles(path="my.txt")))
    run.generate(run.Generate(checkpoint=folder, prompt="Once"))

The fields of `Finetune` are the flags of `jaxformer finetune`, and so on.
"""

from jaxformer.run.evaluation import evaluate as evaluate
from jaxformer.run.evaluator import Evaluate as Evaluate
from jaxformer.run.exporting import Export as Export
from jaxformer.run.exporting import export as export
from jaxformer.run.finetuning import Finetune as Finetune
from jaxformer.run.finetuning import finetune as finetune
from jaxformer.run.loading import LoadedModel as LoadedModel
from jaxformer.run.loading import load_run as load_run
from jaxformer.run.preference_training import Dpo as Dpo
from jaxformer.run.preference_training import dpo as dpo
from jaxformer.run.pretraining import Pretrain as Pretrain
from jaxformer.run.pretraining import pretrain as pretrain
from jaxformer.run.text_generation import Generate as Generate
from jaxformer.run.text_generation import generate as generate
