"""A user's own images: a folder per class, a CSV of paths, an npz, or a data set of the Hub.

    data = OwnImages("photos", size=64).prepared()      # decodes, resizes, divides, caches
    data.classes                                        # ("cat", "dog", "fish")
    data.load()["test"]

`demur train images-pgdat-rr data=photos size=64` does the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from demur.data.dataset import Dataset, Splits, ThreatModel
from demur.data.image_cache import CachedImages, read_images
from demur.errors import BadInput, shorten
from demur.field_types import Condition
from demur.images import Domain

ImageSize = Annotated[int, Condition(lambda v: 8 <= v <= 1024, "from 8 to 1024")]
MEAN, STD = 0.5, 0.25  # of every channel; the batch norm behind the first layer does the rest


@dataclass(frozen=True)
class OwnImages(Dataset):
    """Your own images, resized to squares, in splits that are stratified by class.

    The folder may have the splits train, val, cal and test. Those that it lacks are taken out of
    the training images: 10% val, 15% cal, 15% test of each class. The pixels of an image decide
    its split. Duplicates are left out; of several splits the last one keeps the image.

    Attributes:
        path: A folder with one folder per class (or train/CLASS, test/CLASS ...), a .csv with the
            columns path and label, an .npz with x and y, or hub:NAME.
        size: Height and width in pixels, 8 to 1024; images are resized to it.
        channels: 1 or 3; None is 1 where every image is grey.
        classes: Names of the classes; `prepared` finds them.
        content: Digest of all images, classes and splits; `prepared` computes it and `load`
            checks it.

    Raises:
        BadInput: `prepared` or `load` finds no images, or other images than those of `content`.

    Example:
        >>> from demur import OwnImages
        >>> OwnImages("photos", size=64).resizes
        True
    """

    threat = ThreatModel(linf=8 / 255, linf_step=2 / 255, l2=128 / 255, l2_step=16 / 255)

    path: str = ""
    size: ImageSize = 32
    channels: Literal[1, 3] | None = None
    classes: tuple[str, ...] = ()
    content: str = ""

    @property
    def domain(self) -> Domain:
        if not self.classes or self.channels is None:
            raise BadInput("the images are not read yet; name them with data=PATH")
        shape = (self.channels, self.size, self.size)
        each = self.channels
        return Domain(len(self.classes), shape, mean=(MEAN,) * each, std=(STD,) * each)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def resizes(self) -> bool:
        return True

    def prepared(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_message: Callable[[str], None] = lambda sentence: None,
    ) -> "OwnImages":
        """Return a copy with channels, classes and content, after every image is read once.

        Args:
            on_progress: Called with (images done, images in all) while they are decoded.
            on_message: Called with sentences about splits, damaged files and duplicates.
        """
        if self.content:
            return self
        cached = self._cached(None, on_progress)
        for sentence in cached.report:
            on_message(f"{self.path}: {sentence}")
        channels: Literal[1, 3] = 1 if cached.channels == 1 else 3
        return replace(self, channels=channels, classes=cached.classes, content=cached.content)

    def load(self, folder: Path | None = None) -> Splits:
        if not self.content:
            return self.prepared().load(folder)
        return self._checked(folder).splits()

    def listing(self, folder: Path | None = None) -> str:
        return self._checked(folder).listing

    def _checked(self, folder: Path | None) -> CachedImages:
        """The images, which must be those that the fields describe."""
        cached = self._cached(folder)
        if cached.content != self.content:
            raise BadInput(
                f"the images in {shorten(str(folder or self.path))} are not those of this recipe: "
                f"expected digest {self.content[:16]}, found {cached.content[:16]}; restore them, "
                "or train again with data=PATH (another version of Pillow may decode JPEG files "
                "differently)"
            )
        return cached

    def _cached(
        self,
        folder: Path | None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> CachedImages:
        if not self.path:
            raise BadInput("this recipe needs your images; name them with data=PATH")
        path = str(folder) if folder else self.path
        return read_images(path, self.size, self.channels, on_progress)
