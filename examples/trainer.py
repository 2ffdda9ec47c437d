"""The Trainer of transformers: a class and one argument are lowp's.

python examples/trainer.py
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from lowp.integrations.transformers import LowpTrainer

set_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **sizes))
pieces = torch.randint(2, 100, (512, 8))
pieces[::2, 3] = 1  # every second text has the piece that it is about
data = [{"input_ids": one, "labels": int(1 in one)} for one in pieces]

arguments = TrainingArguments(
    output_dir="trainer-out",  # its checkpoints resume with the same bits: trainer.train(resume_from_checkpoint=True)
    num_train_epochs=3, per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=10, logging_steps=16,
    use_cpu=True, report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = LowpTrainer(
    model, arguments, train_dataset=data, eval_dataset=data, precision="fp16",  # without fp16=True in the arguments
    compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
)  # fmt: skip
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, loss scale {trainer.lowp.scale:g}")
