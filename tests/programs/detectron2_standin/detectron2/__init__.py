"""A stand-in for machines without detectron2: the parts that the lesson uses, as documented."""
