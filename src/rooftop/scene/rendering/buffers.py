"""The data that the stages of a frame share. Comments give each field's shape, its writer and its readers ("writer ->
readers").

A *pair* is an instance in one view: pair = view * instances + instance, where `instances` is the capacity for
instances, including unused entries. Lists have a fixed capacity and a counter. Items beyond the capacity are counted
but not written, and then the renderer draws the frame again with larger lists.
"""

import warp as wp

# ---- the scene: meshes written by uploads.py, instances by init_context.py -------------------------------------------


@wp.struct
class Resident:
    """The scene on the device: meshes and instances."""

    words: wp.array(dtype=wp.int32)  # the pages of all meshes, concatenated; with a pool, the pool's slots
    page_at: wp.array(dtype=wp.int64)  # (pages,) the index of each page's first word in `words`; -1: not in the pool
    nodes: wp.array3d(dtype=wp.int32)  # (nodes, 8, 16): the trees of all meshes; nodes are numbered per mesh
    # (meshes, 4), columns: first node, first page, attribute bits (HAS_NORMALS, ...), 0
    mesh: wp.array2d(dtype=wp.int32)
    mesh_steps: wp.array2d(dtype=wp.float32)  # (meshes, 2), columns: grid step of positions, grid step of uv
    mesh_box: wp.array2d(dtype=wp.float32)  # (meshes, 6): centre and half size of the box
    instance_mesh: wp.array(dtype=wp.int32)  # (instances,) the instance's mesh; -1: no instance
    # (instances,) the largest stretch factor; negative if the instance mirrors
    instance_scale: wp.array(dtype=wp.float32)
    instance_to_world: wp.array2d(dtype=wp.float64)  # (instances, 12): 3 x 4 matrices from mesh space to world space
    # (instances, 12): `instance_to_world` in the previous frame; valid only if the instance moved since then
    instance_before: wp.array2d(dtype=wp.float64)
    instance_moved: wp.array(dtype=wp.int32)  # (instances,) the last frame in which the instance moved; -1: none
    instance_normals: wp.array2d(dtype=wp.float32)  # (instances, 9): 3 x 3 matrices that transform normals to the world


MESH_FIRST_NODE, MESH_FIRST_PAGE, MESH_ATTRIBUTES = wp.constant(0), wp.constant(1), wp.constant(2)
HAS_NORMALS, HAS_UV, HAS_COLORS = wp.constant(1), wp.constant(2), wp.constant(4)  # bits

# ---- the views, written by uploads.py --------------------------------------------------------------------------------


@wp.struct
class Views:
    """The views of a frame, or of the previous frame: cameras, followed by shadow maps."""

    from_world: wp.array2d(dtype=wp.float64)  # (views, 12): 3 x 4, from the world to x right, y down, z forward
    lens: wp.array2d(dtype=wp.float32)  # (views, 8), columns LENS_FX ...
    pictures: wp.array2d(dtype=wp.int32)  # (views, 4), columns PICTURE_WIDTH ...
    same: wp.int32  # pixels of each camera if all cameras have the same size, 0 if not (`Canvas.same`)


LENS_FX, LENS_FY, LENS_CX, LENS_CY = wp.constant(0), wp.constant(1), wp.constant(2), wp.constant(3)  # pixels
LENS_NEAR = wp.constant(4)  # world units
LENS_ORTHOGRAPHIC = wp.constant(5)  # 1 or 0
LENS_TANGENT = wp.constant(6)  # tangent of the angle between the axis and the farthest corner
LENS_FRAME = wp.constant(7)  # the number of the frame, as the bits of an int32
PICTURE_WIDTH, PICTURE_HEIGHT = wp.constant(0), wp.constant(1)  # pixels
PICTURE_AT = wp.constant(2)  # index of the picture's first pixel among the pixels of all views
PICTURE_LEVELS = wp.constant(3)  # number of levels of hierarchical z, including level 0, the pixels

# ---- a frame ---------------------------------------------------------------------------------------------------------


@wp.struct
class Frame:
    """The working data of a frame: values for each pair of view and instance, lists, and pictures."""

    instances: wp.int32
    cameras: wp.int32  # number of camera views; only these have a previous frame and outputs
    pixel_error: wp.float32  # allowed error of a surface, in pixels
    # For each pair, the transform from mesh space to the view's space: written by init_context, read by all stages.
    to_view: wp.array2d(dtype=wp.float32)  # (pairs, 12)
    before: wp.array2d(dtype=wp.float32)  # (pairs, 12), `to_view` in the previous frame
    # Lists of the culling stages. An entry is pair << 32 | item.
    # (2 * PASS,): PASS counters of the first pass, then those of the second. At the indices GROUPS, VISIBLE, ...: the
    # length of each list, including items for which the list had no room, and other counts
    counters: wp.array(dtype=wp.int32)
    # (2, room): one row has the nodes of a tree level, the other those of the next (instance_cull, level_cull ->
    # level_cull)
    nodes: wp.array2d(dtype=wp.int64)
    groups: wp.array(dtype=wp.int64)  # children that are groups: node * 8 + slot (level_cull -> level_cull)
    # visible clusters of a pass, in any order: page << 11 | cluster (level_cull -> sort_clusters)
    found: wp.array(dtype=wp.int64)
    # (2, room): visible clusters of each pass, in ascending order of their entries (sort_clusters -> rasterize)
    visible: wp.array2d(dtype=wp.int64)
    hidden_instances: wp.array(dtype=wp.int64)  # instances hidden in the first pass (first pass -> second pass)
    hidden_children: wp.array(dtype=wp.int64)  # children hidden in the first pass, encoded as in `groups`
    hidden_clusters: wp.array(dtype=wp.int64)  # clusters hidden in the first pass, encoded as in `visible`
    # (2 * room,): visible clusters of both passes together, in ascending order (rasterize -> later stages)
    drawn: wp.array(dtype=wp.int64)
    # (2 * room, 16): records (records.py) of the clusters in `drawn` (rasterize -> later stages)
    records: wp.array2d(dtype=wp.int32)
    ranks: wp.array2d(dtype=wp.int32)  # (2, room): the index of each visible cluster in `drawn`, used only by rasterize
    # Pictures.
    # the visibility buffer of all views, row by row: nearness << 33 | rank << 7 | triangle, where rank is an index in
    # `drawn`
    pixels: wp.array(dtype=wp.int64)
    # the number of triangles that covered each pixel of the cameras, counted by rasterize; empty if not requested
    fragments: wp.array(dtype=wp.int32)
    # large triangles, which rasterize draws in tiles: index in `visible` << 7 | triangle
    large: wp.array(dtype=wp.int64)
    # (room, 8): large triangles after clipping: x and y of 3 corners in 1/256 pixel, the view, and rank << 7 | triangle
    # as in `pixels`
    pieces: wp.array2d(dtype=wp.int64)
    piece_depths: wp.array2d(dtype=wp.float32)  # (room, 3)
    tiles: wp.array(dtype=wp.int64)  # piece << 32 | row of the tile << 16 | column of the tile
    # The farthest depth, as near / z, in each square of 2^level x 2^level pixels of the cameras' views: written by hzb,
    # read by the culling stages.
    hzb: wp.array(dtype=wp.float32)  # for each camera, the levels from level 1 on
    hzb_before: wp.array(dtype=wp.float32)
    # (cameras, levels) index in `hzb` of each level's first texel; column 0 is unused, because level 0 is in `pixels`
    hzb_at: wp.array2d(dtype=wp.int32)


# A pixel has near / z as float32 (at most 1, so 30 bits), then 26 bits of rank and 7 bits of triangle.
DEPTH_SHIFT = wp.constant(wp.int64(33))
TRIANGLE_BITS, TRIANGLE_SHIFT = wp.constant(7), wp.constant(wp.int64(7))
TRIANGLES = wp.constant(128)  # threads per cluster
RANK_MASK = wp.constant((1 << 26) - 1)

# Indices of the first pass's counters; the second pass's counters are PASS entries later.
PASS = wp.constant(64)
GROUPS, VISIBLE = wp.constant(0), wp.constant(1)
HIDDEN_INSTANCES, HIDDEN_CHILDREN, HIDDEN_CLUSTERS = wp.constant(2), wp.constant(3), wp.constant(4)
LARGE, PIECES, TILES = wp.constant(5), wp.constant(6), wp.constant(7)
# These counters ignore shadow maps. In DRAWN_LEVELS, bit (level modulo 32) is set for each level of detail drawn.
DRAWN_TRIANGLES, DRAWN_LEVELS, DRAWN_CLUSTERS = wp.constant(8), wp.constant(9), wp.constant(13)
# persistent_cull also uses the counters 10 (claimed entries of its queue) and 11 (finished nodes). It counts all nodes
# as level 0.
# The counters from LEVEL on: the number of nodes at each tree level, at most layouts.MAX_DEPTH levels
LEVEL = wp.constant(16)

# ---- lights, written by shadow_maps.py -------------------------------------------------------------------------------


@wp.struct
class Lights:
    """The lights of a scene and their shadow maps. Each map is a separate view."""

    kind: wp.array(dtype=wp.int32)  # (lights,): DIRECTIONAL, SPOT or POINT
    # (lights, 3): the direction to a directional light, the position of any other light
    vector: wp.array2d(dtype=wp.float64)
    axis: wp.array2d(dtype=wp.float32)  # (lights, 3): the direction in which a spot light shines
    color: wp.array2d(dtype=wp.float32)  # (lights, 3)
    # (lights, 3): range; for a spot light also the cosines of two angles: at the cone's edge, and where full light
    # begins
    reach: wp.array2d(dtype=wp.float32)
    maps: wp.array2d(dtype=wp.int32)  # (lights, 3): the first map, the number of maps per camera, texels along an edge
    from_world: wp.array2d(dtype=wp.float64)  # (maps, 12), as in Views
    lens: wp.array2d(dtype=wp.float32)  # (maps, 8)
    texel_at: wp.array(dtype=wp.int64)  # (maps,) the start of each map in `depths`
    depths: wp.array(dtype=wp.float32)  # depth of the nearest surface along the map view's axis; inf without a surface


DIRECTIONAL, SPOT, POINT = wp.constant(0), wp.constant(1), wp.constant(2)

# ---- outputs ---------------------------------------------------------------------------------------------------------


@wp.struct
class Targets:
    """The outputs of a frame: a value for each pixel, in the order of `Frame.pixels`. Every pixel is written, including
    background. Outputs that are not requested are empty arrays."""

    # Written by emit_depth_targets, or by base_pass if the frame has a base pass.
    depth: wp.array(dtype=wp.float32)  # world units along the view's axis
    instance: wp.array(dtype=wp.int32)
    cluster: wp.array(dtype=wp.int32)  # index of the cluster in its mesh
    triangle: wp.array(dtype=wp.int32)  # index of the triangle in its cluster
    level: wp.array(dtype=wp.int32)  # level of detail: 0 is the finest
    material: wp.array(dtype=wp.int32)
    coverage: wp.array(dtype=wp.bool)  # whether a surface covers the pixel's centre
    material_depth: wp.array(dtype=wp.float32)  # (material + 1) / 2^16
    velocity: wp.array2d(dtype=wp.float32)  # pixels since the previous frame, to the right and down
    # Written only by base_pass, unless a comment names another writer.
    normal: wp.array2d(dtype=wp.float32)  # in the world
    uv: wp.array2d(dtype=wp.float32)
    color: wp.array2d(dtype=wp.float32)  # 0 to 1
    base_color: wp.array2d(dtype=wp.float32)  # in linear light; base_colors writes it
    vertex_color: wp.array2d(dtype=wp.float32)
    shadow: wp.array2d(dtype=wp.float32)  # (pixels, lights); the stage of shadows.py writes it
