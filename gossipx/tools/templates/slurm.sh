#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ peers_per_node }}
#SBATCH --cpus-per-task={{ threads }}
{% if gpus %}
#SBATCH --gpus-per-task={{ gpus }}
{% endif %}
{% if time %}
#SBATCH --time={{ time }}
{% endif %}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

# A task is a peer: gossipx run takes rank, size and addresses from SLURM.
{% if needs_secret %}
# Peers authenticate by a secret of this job, which srun passes on.
GOSSIPX_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export GOSSIPX_SECRET
{% endif %}
# A failing task or node does not end the others, nor does the first task that ends.
exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task={{ threads }} \
    {{ command }}
