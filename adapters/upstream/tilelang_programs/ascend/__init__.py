"""The programs in TileLang's Ascend dialect: a grid of one axis, loops in T.SimtVF, products on the cube.

Same modules, names and parameters as the common text, without its faults. A copy into the unified buffer writes
nothing where it reaches outside its tensor, so a tile that is read there is filled first.
"""
