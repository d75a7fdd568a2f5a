"""Starting points: the templates of `skyrl init`, and small models that train on a CPU in minutes."""
