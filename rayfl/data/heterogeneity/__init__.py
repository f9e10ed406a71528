"""How different data are: super-clusters of classes, and distances between the data of clients.

Thesis chapter 5 (Vahidian, "A new notion of data heterogeneity"). There is one measure per file in
:mod:`rayfl.data.heterogeneity.measures`; :mod:`rayfl.data.heterogeneity.distances` applies them to a
federation; :mod:`rayfl.data.heterogeneity.super_clusters` groups classes.
"""
