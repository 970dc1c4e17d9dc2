POOLINGS = ("auto", "avg", "max", "avg+max", "gem", "gem-learned", "flatten", "token")
WEIGHT_SOURCES = ("auto", "package", "hub", "none")
