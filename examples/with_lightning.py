"""NGD in Lightning, in mixed precision with clipped gradients. Needs lightning.

Lightning refuses to clip gradients in mixed precision for optimizers that take scaled gradients by
themselves, as ours do to avoid waiting for the GPU; an attribute that torch reads turns that off.
"""

import lightning
import torch
from faster_training import NGD, ngd_groups
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Trained by the optimizer that `configure_optimizers` returns."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = NGD(ngd_groups(self, weight_decay=0.01), lr=0.05)
        optimizer._step_supports_amp_scaling = False
        return optimizer


torch.manual_seed(0)
x = torch.randn(512, 20)
data = TensorDataset(x, x[:, :4].argmax(1))
trainer = lightning.Trainer(
    max_epochs=6, accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
print(f"training loss {trainer.callback_metrics['loss']:.3f}")
