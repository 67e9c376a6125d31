"""The cache: pages and who owns them. Their bytes are in ``kvframe.attention.storage``.

Its files, in the order of the flow; each uses only those before it.

- When blocks die, and so which blocks a hit needs: ``live_range``; the same as data for other processes: ``layout``.
- Pages: what requests hint of them (``hints``), which are taken next (``block_order``), free ones of several sizes
  (``slabs``), all of them (``block_pool``).
- The inputs of requests beside their tokens: ``input_index``.
- The blocks of each running request, and what is counted of it: ``block_table``.
- Finding tokens: ``radix_tree``, ``publisher``.
- Data for other processes: ``events``.
- Hits and pins, in the pool and its indexes as one: ``stats``, ``prefix_lookup``.
- Requests that run: argument checks (``arguments``); blocks are allocated (``allocation``); rows begin, run, release
  dead blocks and end (``coordinator``).
- What a request could continue from, wherever its blocks are: ``stored_prefix``.
- Prefixes from outside of the pool: ``restore``.
- What an engine calls: ``manager``.
"""
