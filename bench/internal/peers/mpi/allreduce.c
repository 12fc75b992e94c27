/* Times MPI_Allreduce of floats for bench: allreduce ELEMENTS ROUNDS CALLS prints, for each round, the milliseconds of a call in a row
 * of CALLS, on the slowest rank. Without arguments it prints the version of MPI. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
	char version[MPI_MAX_LIBRARY_VERSION_STRING];
	int rank, ranks, length;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (argc != 4) {
		MPI_Get_library_version(version, &length);
		version[strcspn(version, ",\n")] = 0;
		if (rank == 0)
			printf("%s\n", version);
		MPI_Finalize();
		return 0;
	}
	int elements = atoi(argv[1]), rounds = atoi(argv[2]), calls = atoi(argv[3]);
	float *buf = malloc(sizeof(float) * elements);
	if (!buf)
		MPI_Abort(MPI_COMM_WORLD, 1);
	for (int i = 0; i < elements; i++)
		buf[i] = rank + 1;
	MPI_Allreduce(MPI_IN_PLACE, buf, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < elements; i++)
		if (buf[i] != ranks * (ranks + 1) / 2) {
			fprintf(stderr, "the sum is wrong\n");
			MPI_Abort(MPI_COMM_WORLD, 1);
		}
	memset(buf, 0, sizeof(float) * elements);
	for (int r = 0; r < rounds; r++) {
		MPI_Barrier(MPI_COMM_WORLD);
		double began = MPI_Wtime();
		for (int c = 0; c < calls; c++)
			MPI_Allreduce(MPI_IN_PLACE, buf, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
		double mine = 1e3 * (MPI_Wtime() - began) / calls, slowest;
		MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
		if (rank == 0)
			printf("%.6f ", slowest);
	}
	if (rank == 0)
		printf("\n");
	free(buf);
	MPI_Finalize();
	return 0;
}
