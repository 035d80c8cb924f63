"""The image classifiers by their names: our own, and any of torchvision or timm.

model = create_model("resnet50", classes=10, channels=3, image_size=32)
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, did_you_mean, first_line, needing, refused_as
from models import resnet, vgg

ARCHITECTURES = (*resnet.STAGES, "vgg8")
"""The names of our own networks."""
INCEPTIONS = ("googlenet", "inception_v3")
TIMM = "timm:"  # in front of the name of a model of timm


class GreyToColour(nn.Module):
    """Repeats one channel three times, for torchvision's models."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


def create_model(arch: str, *, classes: int, channels: int, image_size: int) -> nn.Module:
    """Create the model of a name, in training mode.

    Args:
        arch: one of `ARCHITECTURES`, a classification model of torchvision, or timm:NAME.
        channels: 1 or 3 channels of the images.
        image_size: height and width of the images in pixels.

    Raises:
        InputError: there is no such model, or it cannot take images of that size.
    """
    sizes = {"channels": channels, "image_size": image_size}
    if arch in resnet.STAGES:
        return resnet.create_resnet(arch, classes=classes, **sizes)
    if arch.startswith(TIMM):
        return _create_timm_model(arch, classes, **sizes)
    if arch == "vgg8":
        return checked(vgg.VGG8(classes=classes, channels=channels), arch, **sizes)
    return checked(_create_torchvision_model(arch, classes, **sizes), arch, **sizes)


def part_for_colours(model: nn.Module) -> nn.Module:
    """The part of a model that takes images of three channels; mostly the model itself."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], GreyToColour):
        return model[1]
    return model


def default_weights(arch: str) -> tuple[dict[str, Tensor], list[str]]:
    """The pretrained weights that torchvision, or timm, has for an architecture; downloads them.

    Returns:
        The weights, and the names of their classes, which timm does not know.
    Raises:
        InputError: there are none, or they cannot be downloaded.
    """
    try:
        if arch.startswith(TIMM):
            return _timm_weights(arch.removeprefix(TIMM)), []
        from torchvision import models

        weights = models.get_model_weights(arch).DEFAULT  # whose keys some models rename
        model = models.get_model(arch, weights=weights, progress=False)
        return model.state_dict(), weights.meta["categories"]
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        problem = "could not be downloaded" if isinstance(error, OSError) else "are not there"
        reason = getattr(error, "reason", first_line(error))
        raise InputError(f"those of {arch} {problem} ({reason}); give a file") from None


def _timm_weights(name: str) -> dict[str, Tensor]:
    import timm
    from huggingface_hub import snapshot_download  # unlike timm, gives up at once

    known: Any = timm.get_pretrained_cfg(name)
    there: dict[str, Any] = {}
    if known is not None and known.hf_hub_id:
        file = known.hf_hub_filename or "model.safetensors"
        path = Path(snapshot_download(known.hf_hub_id, allow_patterns=file)) / file
        there = {"pretrained_cfg_overlay": {"file": str(path)}} if path.is_file() else {}
    return timm.create_model(name, pretrained=True, **there).state_dict()


def usual_preprocessing(arch: str) -> dict[str, Any]:
    """The mean, std, size and interpolation of images that pretrained weights expect.

    It is what torchvision or timm says of its default weights of the architecture; {} where there
    are none.
    """
    try:
        if arch.startswith(TIMM):
            import timm

            known: Any = timm.get_pretrained_cfg(arch.removeprefix(TIMM), allow_unregistered=False)
            config = timm.data.resolve_data_config(pretrained_cfg=known.to_dict())
            mean, std, size = config["mean"], config["std"], config["input_size"][-1]
            interpolation = config["interpolation"]
        else:
            from torchvision import models

            known = models.get_model_weights(arch).DEFAULT.transforms()
            mean, std, size = known.mean, known.std, known.crop_size[0]
            if arch in INCEPTIONS:  # which torchvision makes with weights scale their inputs again
                mean = std = [0.5] * 3
            interpolation = known.interpolation.value
    except (ImportError, ValueError, RuntimeError, AttributeError):
        return {}
    if interpolation not in ("bilinear", "bicubic"):
        interpolation = "bicubic"  # the nearest that tensors have
    return {"mean": list(mean), "std": list(std), "size": size, "interpolation": interpolation}


def _create_timm_model(arch: str, classes: int, *, channels: int, image_size: int) -> nn.Module:
    with needing(arch, "timm"):
        import timm
    name = arch.removeprefix(TIMM)
    if not timm.is_model(name):
        raise InputError(
            f"{arch}: timm {timm.__version__} has no such model"
            f"{did_you_mean(name, timm.list_models())}"
        )
    create = partial(timm.create_model, name, num_classes=classes, in_chans=channels)
    with refused_as(arch, (RuntimeError,)):  # such as of a tag that is not there
        model = create()
    try:
        return checked(model, arch, channels=channels, image_size=image_size)
    except InputError:
        if not getattr(model, "default_cfg", {}).get("fixed_input_size"):  # as a ViT has
            raise
    with refused_as(arch, (RuntimeError, AssertionError, TypeError, ValueError)):
        model = create(img_size=image_size)
    return checked(model, arch, channels=channels, image_size=image_size)


def _create_torchvision_model(
    arch: str, classes: int, *, channels: int, image_size: int
) -> nn.Module:
    from torchvision import models  # only needed for a model that is not ours

    torchvision_models = models.list_models(module=models)
    if arch not in torchvision_models:
        raise InputError(
            f"{arch}: unknown model; choose one of {', '.join(ARCHITECTURES)} "
            "or a torchvision model such as swin_t"
            f"{did_you_mean(arch, [*ARCHITECTURES, *torchvision_models])}"
        )
    options: dict[str, int] = {"aux_logits": False} if arch in INCEPTIONS else {}
    options |= {"image_size": image_size} if arch.startswith("vit_") else {}
    with refused_as(arch, (AssertionError,)):
        model = models.get_model(arch, weights=None, num_classes=classes, **options)
    return nn.Sequential(GreyToColour(), model) if channels == 1 else model


def checked(model: nn.Module, arch: str, *, channels: int, image_size: int) -> nn.Module:
    """The model in training mode, after it has taken an image of that size."""
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, channels, image_size, image_size))
    except (RuntimeError, AssertionError) as error:
        usual = usual_preprocessing(arch).get("size", 224)
        raise InputError(
            f"{arch} cannot take {image_size}x{image_size} images "
            f"({first_line(error)}); try an image size of 64 or {usual}"
        ) from None
    return model.train()
