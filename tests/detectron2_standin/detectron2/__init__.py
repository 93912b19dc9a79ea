"""A small stand-in for detectron2, for machines without it: the parts that the lesson uses, as documented there."""
