#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=3
#SBATCH --gpus-per-task=1
#SBATCH --time=1-12
#SBATCH --partition=gpu
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

# A task is a peer: gossipx run takes rank, size and addresses from SLURM.
# Peers authenticate by a secret of this job, which srun passes on.
GOSSIPX_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export GOSSIPX_SECRET
# A failing task or node does not end the others, nor does the first task that ends.
exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task=3 \
    gossipx run --bind 0.0.0.0 --policy tau:5 --threads 3 'train it.py' --epochs 3
