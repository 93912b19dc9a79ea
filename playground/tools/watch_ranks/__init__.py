"""What watch.py and first_difference.py stand on, and the exercises and the tests, too."""
