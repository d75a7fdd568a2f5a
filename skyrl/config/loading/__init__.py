"""Files, arguments and stored runs become a tree; the tree is resolved, checked and explained."""
