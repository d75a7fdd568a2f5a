"""What a run needs to go on after it stopped, stored whole or not at all."""
