#!/bin/bash
#SBATCH --job-name=gossipx
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-task=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

# A task is a peer: gossipx run takes rank, size and addresses from SLURM.
# A failing task or node does not end the others, nor does the first task that ends.
exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task=1 \
    gossipx run --device cpu
