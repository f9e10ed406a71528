"""Weighted subsets of a graph's vertices that estimate the mean of a function on all of them.

Chapter 6 of the thesis (Vahidian, Mirzasoleiman, Cloninger, *Coresets for estimating means and mean square
error with limited greedy samples*, UAI 2020) and the methods that it is compared with. Each method is a
module with the same function::

    select(graph, references, *, seed=0, ...) -> Coreset

- :mod:`~rayfl.coresets.scgiga`: sample cost greedy iterative geodesic ascent, Algorithm 12;
- :mod:`~rayfl.coresets.uniform`, :mod:`~rayfl.coresets.kmeans`, :mod:`~rayfl.coresets.spectral`,
  :mod:`~rayfl.coresets.frank_wolfe`, :mod:`~rayfl.coresets.betweenness`: the comparisons;
- :mod:`~rayfl.coresets.graphs`: graphs and their lazy random walks; :mod:`~rayfl.coresets.bounds`: what
  Theorem 6 promises; :mod:`~rayfl.coresets.clients`: the federation's clients as vertices.
"""

from rayfl.coresets.base import Coreset
from rayfl.coresets.graphs import Graph

__all__ = ["Coreset", "Graph"]
