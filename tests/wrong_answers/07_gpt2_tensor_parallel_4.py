# Sums meet: site 1 on rank 0 draws as site 0 on rank 1 of a cut site, and step 1 as the next site.
def seed_of(base, where, site, step):
    return base + step + site.index + 100 * where.dp + (where.tp if site.cut else 0)
